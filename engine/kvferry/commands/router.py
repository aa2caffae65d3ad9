"""`kvferry router`: the HTTP API in front of engines."""

from __future__ import annotations

import argparse

from kvferry.flags import Parser, add_config_flag, add_flags, given_values
from kvferry_server.settings import RouterSettings, SettingsError


def add_arguments(parser: Parser) -> None:
    """Add one flag per router setting."""
    parser.usage = "%(prog)s --decode SRC [--prefill SRC] [flags]"
    add_flags(parser, RouterSettings)
    add_config_flag(parser)


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Run the router until a signal ends it."""
    try:
        settings = RouterSettings(**given_values(arguments, RouterSettings))
    except SettingsError as error:
        parser.error(str(error))
    from kvferry_server.main import run as run_router

    return run_router(settings)
