"""`kvferry version`: the version, one word, for scripts."""

from __future__ import annotations

import argparse
from importlib.metadata import version

from kvferry.flags import Parser


def add_arguments(parser: Parser) -> None:
    """Nothing to choose."""


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Print the version."""
    print(version("kvferry"))
    return 0
