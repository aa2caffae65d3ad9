"""`kvferry crd`: the CustomResourceDefinition that this version understands, ready for `kubectl apply -f -`."""

from __future__ import annotations

import argparse

from kvferry.flags import Parser
from kvferry_operator.schema import crd_text


def add_arguments(parser: Parser) -> None:
    """Nothing to choose."""


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Print the YAML."""
    print(crd_text(), end="")
    return 0
