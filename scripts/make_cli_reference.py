"""Prints docs/cli.md, the reference of every command and flag; a test keeps the file equal to what this prints.

So the list of flags is frozen: adding one shows up in the change that adds it, with its documentation (`make docs`).
"""

from __future__ import annotations

import argparse
import importlib
import sys

from kvferry.cli import COMMANDS
from kvferry.flags import Parser

_HEAD = """\
# Command line

Made by `make docs` from the settings themselves; a test fails when it is out of date. Flags carry vLLM's names where vLLM
has them. Sizes take suffixes: `k`, `m`, `g` are powers of 1000, `K`, `M`, `G` (and `Ki`, `Mi`, `Gi`) of 1024. `--config FILE`
reads flag names and values from YAML; the command line wins over it.
"""


def reference() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"kvferry.commands.{command.module}")
        parser = Parser(prog=f"kvferry {name}", description=command.summary)
        module.add_arguments(parser)
        parts.append(f"## kvferry {name}\n\n{command.summary}\n")
        rows = [_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        if rows:
            parts.append("\n".join(["| flag | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest.upper()}`"
    help_text = (action.help or "") % {"default": action.default, "prog": ""}
    if action.choices is not None:
        help_text += f" One of: {', '.join(str(choice) for choice in action.choices)}."
    elif isinstance(action.metavar, str) and action.metavar.startswith("{"):
        help_text += f" One of: {action.metavar.strip('{}').replace(',', ', ')}."
    return f"| {names} | {help_text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
