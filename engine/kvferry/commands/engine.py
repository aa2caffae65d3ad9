"""`kvferry engine`: one model replica, found by routers over its wire port."""

from __future__ import annotations

import argparse

from kvferry.flags import Parser, add_config_flag, add_flags, given_values
from kvferry_engine.config import EngineConfig


def add_arguments(parser: Parser) -> None:
    """Add one flag per engine setting."""
    parser.usage = "%(prog)s MODEL [flags]"
    add_flags(parser, EngineConfig)
    add_config_flag(parser)


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Run the engine until a signal ends it."""
    values = given_values(arguments, EngineConfig)
    if "model" not in values:
        parser.error("a MODEL is required: a folder, a .gguf file, pkg:NAME or a hub id")
    config = EngineConfig(**values)
    from kvferry_engine.main import run as run_engine

    return run_engine(config)
