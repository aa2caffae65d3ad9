"""The `kvferry` command: one subcommand a line, each imported only when called.

Processes get their first signal handlers here, before any heavy import: a Python that is PID 1 of a container ignores
SIGTERM without one. They end the process at once, which is right until something runs; each process then sets its own.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

USAGE_ERROR = 2
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: its module (with `add_arguments` and `run`), one line of help, the extra that brings its imports."""

    module: str
    summary: str
    extra: str = ""
    is_process: bool = False


COMMANDS = {
    "serve": Command(module="serve", summary="Serve a model: a router and one engine.", extra="all", is_process=True),
    "up": Command(module="up", summary="Run an LLMService manifest on this machine.", extra="all", is_process=True),
    "router": Command(module="router", summary="Run a router: the HTTP API.", extra="router", is_process=True),
    "engine": Command(module="engine", summary="Run an engine: one model replica.", extra="engine", is_process=True),
    "chat": Command(module="chat", summary="Chat with a running server."),
    "complete": Command(module="complete", summary="Complete texts with a running server."),
    "bench": Command(module="bench", summary="Measure a running server."),
    "crd": Command(module="crd", summary="Print the LLMService CustomResourceDefinition.", extra="operator"),
    "version": Command(module="version", summary="Print the version."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; usage errors exit with 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-v", "--version"):
        words[0] = "version"
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else USAGE_ERROR
    name = words[0]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        print(f"kvferry: error: no command {name!r}; {hint}", file=sys.stderr)
        return USAGE_ERROR
    if command.is_process:
        _end_at_once_on_signals()
    return _run(name, command, words[1:])


def usage() -> str:
    """Return the text of `kvferry --help`."""
    lines = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvferry COMMAND [...]",
            "",
            "Disaggregated LLM serving: a router, prefill and decode engines.",
            "",
            "commands:",
            *lines,
            "",
            "`kvferry COMMAND --help` tells the flags of a command.",
        ]
    )


def _run(name: str, command: Command, words: Sequence[str]) -> int:
    try:
        from kvferry.flags import Parser, parse_with_config

        module = importlib.import_module(f"kvferry.commands.{command.module}")
        parser = Parser(prog=f"kvferry {name}", description=command.summary)
        module.add_arguments(parser)
        code: int = module.run(parse_with_config(parser, words), parser)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not command.extra or package.startswith("kvferry"):
            raise
        print(
            f"kvferry {name}: error: the Python package {package} is missing; install kvferry[{command.extra}]",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _end_at_once_on_signals() -> None:
    def end(number: int, _frame: object) -> None:
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
