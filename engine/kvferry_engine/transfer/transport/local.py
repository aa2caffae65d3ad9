"""A pair inside one process, for tests and simulations: the meaning of gloo, no threads, and faults on demand.

Like gloo, a send ends when the matching receive is posted, a shorter payload completes a longer receive, and losing one end fails
everything on the other. `LocalHub.deliver` moves payloads, so a test decides when and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kvferry_engine.transfer.staging import TOMBSTONE_BYTES
from kvferry_engine.transfer.transport.base import Completion, Sink, Transport


@dataclass(slots=True)
class LocalFaults:
    """What goes wrong. Sets hold (prefix, pair_seq); `None` as prefix matches every pair."""

    dropped: set[tuple[str | None, int]] = field(default_factory=set)
    """Payloads that never arrive."""
    corrupted: set[tuple[str | None, int]] = field(default_factory=set)
    """Payloads with one byte changed."""
    refuses_to_open: bool = False

    def hits(self, faults: set[tuple[str | None, int]], prefix: str, pair_seq: int) -> bool:
        return (prefix, pair_seq) in faults or (None, pair_seq) in faults


@dataclass(slots=True)
class _Pair:
    ends: dict[bool, LocalTransport] = field(default_factory=dict)
    waiting: dict[bool, tuple[Callable[[Transport], None], Sink]] = field(default_factory=dict)
    sends: dict[int, Tensor] = field(default_factory=dict)
    receives: dict[int, Tensor] = field(default_factory=dict)
    is_broken: bool = False

    def ready(self) -> list[int]:
        return [pair_seq for pair_seq in self.sends if pair_seq in self.receives]


class LocalHub:
    """All pairs of a simulated network. `is_manual`: payloads move only in `deliver`."""

    def __init__(self, *, is_manual: bool = False) -> None:
        self.faults = LocalFaults()
        self.is_manual = is_manual
        self._pairs: dict[str, _Pair] = {}

    def deliverable(self) -> list[tuple[str, int]]:
        """(prefix, pair_seq) of payloads whose both ends are posted."""
        return [
            (prefix, pair_seq)
            for prefix, pair in self._pairs.items()
            for pair_seq in pair.ready()
            if not self.faults.hits(self.faults.dropped, prefix, pair_seq)
        ]

    def deliver(self, prefix: str, pair_seq: int) -> None:
        """Move one payload and complete both ends."""
        pair = self._pairs[prefix]
        payload, view = pair.sends.pop(pair_seq), pair.receives.pop(pair_seq)
        view[: payload.numel()].copy_(payload)
        if self.faults.hits(self.faults.corrupted, prefix, pair_seq):
            view[payload.numel() // 2] ^= 0x40
        pair.ends[True].complete(pair_seq, "")
        pair.ends[False].complete(pair_seq, "")

    def kill(self, boot: str) -> None:
        """Break every pair of one process, as its death would."""
        for prefix, pair in self._pairs.items():
            if boot in prefix:
                self._break(pair, "connection closed by peer")

    def open(self, prefix: str, is_sender: bool, on_open: Callable[[Transport], None], sink: Sink) -> None:
        """One end came; both are opened when the second one does."""
        pair = self._pairs.setdefault(prefix, _Pair())
        pair.waiting[is_sender] = (on_open, sink)
        if len(pair.waiting) < 2:
            return
        for side, (callback, its_sink) in pair.waiting.items():
            pair.ends[side] = LocalTransport(self, prefix, is_sender=side, sink=its_sink)
            callback(pair.ends[side])
        pair.waiting.clear()

    def post(self, prefix: str, pair_seq: int, view: Tensor, *, is_sender: bool) -> None:
        """A send or a receive was posted."""
        pair = self._pairs[prefix]
        if pair.is_broken:
            pair.ends[is_sender].complete(pair_seq, "the pair is closed")
            return
        (pair.sends if is_sender else pair.receives)[pair_seq] = view
        if not self.is_manual and (prefix, pair_seq) in self.deliverable():
            self.deliver(prefix, pair_seq)

    def cancel(self, prefix: str, pair_seq: int) -> None:
        """Turn a payload that has not moved into a tombstone."""
        sends = self._pairs[prefix].sends
        if pair_seq in sends:
            sends[pair_seq] = sends[pair_seq][:TOMBSTONE_BYTES]

    def close(self, prefix: str) -> None:
        """One end closed."""
        self._break(self._pairs[prefix], "the pair is closed")

    def _break(self, pair: _Pair, error: str) -> None:
        if pair.is_broken:
            return
        pair.is_broken = True
        for is_sender, posted in ((True, pair.sends), (False, pair.receives)):
            for pair_seq in list(posted):
                del posted[pair_seq]
                pair.ends[is_sender].complete(pair_seq, error)


class LocalTransport:
    """One end of a pair in the hub."""

    needs_launch = False

    def __init__(self, hub: LocalHub, prefix: str, *, is_sender: bool, sink: Sink) -> None:
        self._hub = hub
        self._prefix = prefix
        self._is_sender = is_sender
        self._sink = sink

    def complete(self, pair_seq: int, error: str) -> None:
        self._sink(Completion(pair_seq, error))

    def post_recv(self, pair_seq: int, view: Tensor) -> None:
        self._hub.post(self._prefix, pair_seq, view, is_sender=False)

    def send(self, pair_seq: int, view: Tensor) -> None:
        self._hub.post(self._prefix, pair_seq, view, is_sender=True)

    def launch(self, pair_seq: int) -> None:
        raise AssertionError("local sends wait for nobody")

    def cancel(self, pair_seq: int) -> None:
        self._hub.cancel(self._prefix, pair_seq)

    def close(self) -> None:
        self._hub.close(self._prefix)


class LocalConnector:
    """Opens pairs of one rank in a hub."""

    device_type = "cpu"

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub

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
        if not store_address or self._hub.faults.refuses_to_open:
            on_error("no way to the peer")
            return
        self._hub.open(prefix, is_sender, on_open, sink)

    def close(self) -> None:
        return
