"""`kvferry chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from kvferry.commands.conversation import add_common_arguments, converse, print_stream, read_turn
from kvferry.flags import Parser
from kvferry.http_client import HttpClient


def add_arguments(parser: Parser) -> None:
    """Add where to connect, what to say first."""
    add_common_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="System message at the start of the conversation.")


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Talk until the input ends; with -q one turn."""
    return converse(arguments, functools.partial(_talk, arguments))


async def _talk(arguments: argparse.Namespace, client: HttpClient, model: str) -> int:
    messages: list[dict[str, str]] = []
    if arguments.system_prompt:
        messages.append({"role": "system", "content": arguments.system_prompt})
    text = arguments.quick or read_turn("> ")
    while text is not None:
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": model, "messages": messages}
        if arguments.max_tokens is not None:
            body["max_tokens"] = arguments.max_tokens
        answer = await print_stream(client, "/chat/completions", body, lambda choice: choice["delta"].get("content"))
        if arguments.quick:
            break
        messages.append({"role": "assistant", "content": answer})
        text = read_turn("> ")
    return 0
