"""What `kvferry chat` and `kvferry complete` share: flags, the choice of a model, printing a stream."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from kvferry.flags import Parser
from kvferry.http_client import HttpClient, HttpError, first_model


def add_common_arguments(parser: Parser) -> None:
    """Add the flags of both commands, named as vLLM names them."""
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Base URL (default: %(default)s).")
    parser.add_argument("--model-name", help="Model to talk to (default: the first one that the server lists).")
    parser.add_argument("--api-key", help="API key (default: $OPENAI_API_KEY, else EMPTY).")
    parser.add_argument("--max-tokens", type=int, help="Longest answer, in tokens (default: the server's).")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Ask this once, print the answer and end.")


def converse(arguments: argparse.Namespace, talk: Callable[[HttpClient, str], Awaitable[int]]) -> int:
    """Run `talk(client, model)` with a client for the server; errors become one line and exit code 1."""
    try:
        return asyncio.run(_converse(arguments, talk))
    except HttpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _converse(arguments: argparse.Namespace, talk: Callable[[HttpClient, str], Awaitable[int]]) -> int:
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
    client = HttpClient(arguments.url, {"authorization": f"Bearer {key}"})
    model = arguments.model_name or await first_model(client, "/models")
    try:
        return await talk(client, model)
    finally:
        await client.aclose()


async def print_stream(
    client: HttpClient, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]
) -> str:
    """Print a streamed answer as it comes and return it; `text_of` finds the new text in a choice."""
    parts: list[str] = []
    async with client.events(path, body | {"stream": True}) as (_, events):
        async for event in events:
            for choice in event.get("choices", []):
                text = text_of(choice) or ""
                parts.append(text)
                print(text, end="", flush=True)
    print()
    return "".join(parts)


def read_turn(prompt: str) -> str | None:
    """Ask for a line on the terminal; None when the input ends."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None
