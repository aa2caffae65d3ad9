"""The promise of a transport: one direction of one pair, payloads told apart by `pair_seq`, completions through a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Completion:
    """A posted receive or send ended. `error` is empty when it went well."""

    pair_seq: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """A receive is posted, the peer may launch (transports with `needs_launch`)."""

    pair_seq: int


TransportEvent = Completion | Posted
Sink = Callable[[TransportEvent], None]
"""Called from any thread; must only queue and wake."""


class Transport(Protocol):
    """One end of a pair. Methods are called from the rank's main thread and never block.

    Every post_recv and send ends in exactly one Completion, at the latest after `close`. Views must stay untouched until then.
    A shorter payload completes a longer receive.
    """

    needs_launch: bool
    """True: `send` waits for `launch`, which the receiver's Posted allows."""

    def post_recv(self, pair_seq: int, view: Tensor) -> None: ...

    def send(self, pair_seq: int, view: Tensor) -> None: ...

    def launch(self, pair_seq: int) -> None: ...

    def cancel(self, pair_seq: int) -> None:
        """Send a tombstone instead of the payload if that has not begun to travel."""

    def close(self) -> None:
        """Release everything posted; later calls complete with an error."""


class Connector(Protocol):
    """Makes transports of one kind for one rank process."""

    device_type: str
    """Where payload views must live: cpu or cuda."""

    def open(
        self,
        *,
        prefix: str,
        is_sender: bool,
        store_address: str,
        sink: Sink,
        on_open: Callable[[Transport], None],
        on_error: Callable[[str], None],
    ) -> None:
        """Construct one end in the background; exactly one of the callbacks is called, from any thread."""

    def close(self) -> None:
        """Release what transports of this kind share."""
