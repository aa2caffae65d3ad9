"""What a router's /state says about its engines; `kvferry up` waits for it, and the operator will read the same.

A small HTTP client of its own, because nothing else in the base install speaks HTTP in an event loop.
"""

from __future__ import annotations

import asyncio

import msgspec

_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as a router sees it; `reason` says why it is not usable."""

    role: str
    usable: bool
    reason: str = ""


class RouterState(msgspec.Struct, frozen=True, kw_only=True):
    """The engines a router knows."""

    engines: tuple[EngineState, ...] = ()

    def num_usable(self, role: str) -> int:
        """Count the usable engines of a role."""
        return sum(engine.usable and engine.role == role for engine in self.engines)

    def covers(self, *, num_prefill: int, num_decode: int) -> bool:
        """Tell whether as many engines of each role are usable; engines of role `both` count for decode."""
        return self.num_usable("prefill") >= num_prefill and self._num_decode() >= num_decode

    def describe(self, *, num_prefill: int, num_decode: int) -> str:
        """Return one line for a person who waits."""
        reasons = sorted({engine.reason for engine in self.engines if engine.reason})
        counts = f"prefill {self.num_usable('prefill')}/{num_prefill}, decode {self._num_decode()}/{num_decode} usable"
        return f"{counts} ({'; '.join(reasons)})" if reasons else counts

    def _num_decode(self) -> int:
        return self.num_usable("decode") + self.num_usable("both")


async def fetch_state(host: str, port: int) -> RouterState | None:
    """Return the state of the router at `host`:`port`, or None while it does not answer."""
    try:
        body = await asyncio.wait_for(_get(host, port, "/state"), _TIMEOUT_S)
        return msgspec.json.decode(body, type=RouterState)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError):
        return None


async def _get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        answer = b""
        while chunk := await reader.read(_MOST_BYTES):
            answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        return body if b" 200 " in head.split(b"\r\n", 1)[0] else b""
    finally:
        writer.close()
