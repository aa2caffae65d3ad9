"""`kvferry complete`: continue texts with a running server, in the terminal."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from kvferry.commands.conversation import add_common_arguments, converse, print_stream, read_turn
from kvferry.flags import Parser
from kvferry.http_client import HttpClient


def add_arguments(parser: Parser) -> None:
    """Add where to connect."""
    add_common_arguments(parser)


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Complete line after line until the input ends; with -q one text."""
    return converse(arguments, functools.partial(_talk, arguments))


async def _talk(arguments: argparse.Namespace, client: HttpClient, model: str) -> int:
    text = arguments.quick or read_turn("> ")
    while text is not None:
        body: dict[str, Any] = {"model": model, "prompt": text}
        if arguments.max_tokens is not None:
            body["max_tokens"] = arguments.max_tokens
        await print_stream(client, "/completions", body, lambda choice: choice.get("text"))
        text = None if arguments.quick else read_turn("> ")
    return 0
