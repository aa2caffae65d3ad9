"""`kvferry up -f manifest.yaml`: the processes of an LLMService on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvferry.commands.process_logging import configure
from kvferry.flags import Parser
from kvferry_operator.errors import OperatorError, SpecError
from kvferry_operator.local import UpOptions, run_up


def add_arguments(parser: Parser) -> None:
    """Add the few flags that are about this machine; everything about the service stands in the manifest."""
    parser.add_argument(
        "-f", "--filename", type=Path, required=True, metavar="FILE", help="LLMService manifest (YAML)."
    )
    parser.add_argument("--service", metavar="NAME", help="Which LLMService of the file, when it has several.")
    parser.add_argument("--host", default="127.0.0.1", help="Address the HTTP API binds (default: 127.0.0.1).")
    parser.add_argument("--port", type=int, help="Port of the first router (default: expose.port of the manifest).")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="Accepted API keys, one a line (default: the API is open)."
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="Of all processes (default: info).",
    )


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Run until a signal ends it; Ctrl-C stops now, SIGTERM lets running requests finish first."""
    configure(arguments.log_level)
    options = UpOptions(
        filename=arguments.filename,
        service=arguments.service,
        host=arguments.host,
        port=arguments.port,
        api_key_file=arguments.api_key_file,
        log_level=arguments.log_level,
    )
    try:
        return run_up(options, lambda line: print(line, flush=True))
    except SpecError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1
