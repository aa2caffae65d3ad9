"""The transfer worker of a tensor-parallel rank above 0: what `runner.rank` serves between model steps.

`runner` knows no transfers and `transfer` no rank processes; this is where they meet. Rank 0's worker is made in `assembly`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from kvferry_engine.transfer.commands import decode_command, encode_events
from kvferry_engine.transfer.pairs import Stores
from kvferry_engine.transfer.rank_worker import RankWorker
from kvferry_engine.transfer.transport.gloo import GlooConnector


class WorkerSetup(msgspec.Struct, kw_only=True, frozen=True):
    """What a rank's worker is told; the same for every rank."""

    host: str
    num_receive_slots: int
    num_send_slots: int
    slot_bytes: int


class RankTransfer:
    """Implements `runner.rank.RankService`."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker

    def handle(self, payload: bytes) -> None:
        """Execute one encoded transfer command."""
        self._worker.execute(decode_command(payload))

    def poll(self) -> list[bytes]:
        """Return encoded events."""
        events = self._worker.drain()
        return [encode_events(events)] if events else []

    def close(self) -> None:
        """Close all pairs of this rank."""
        self._worker.close()


def make(setup: bytes, rank: int, storage: Tensor, wake: Callable[[], None]) -> RankTransfer:
    """Build the worker of one rank over its KV storage; tensor-parallel ranks always use gloo."""
    told = msgspec.msgpack.decode(setup, type=WorkerSetup)
    return RankTransfer(
        RankWorker(
            storage=storage,
            num_receive_slots=told.num_receive_slots,
            num_send_slots=told.num_send_slots,
            slot_bytes=told.slot_bytes,
            connectors={"gloo": GlooConnector(Stores(), host=told.host)},
            wake=wake,
        )
    )
