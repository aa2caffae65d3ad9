"""Brings commands to all ranks of an engine and their events back, whether a rank lives here or in another process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping

from kvferry_engine.transfer.commands import AnyCommand, AnyEvent, decode_events, encode_command
from kvferry_engine.transfer.rank_worker import RankWorker


class Ranks:
    """The ranks of this engine as the transfer service sees them.

    Ranks in `workers` run here; the others get encoded commands through `forward(rank, data)`, which must keep the order of
    commands and model steps, and their encoded events come in by `deliver`.
    """

    def __init__(
        self,
        workers: Mapping[int, RankWorker],
        *,
        num_ranks: int,
        forward: Callable[[int, bytes], None] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        assert forward is not None or len(workers) == num_ranks
        self.num_ranks = num_ranks
        self._workers = workers
        self._forward = forward
        self._wake = wake
        self._delivered: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def post(self, rank: int, command: AnyCommand) -> None:
        """Have a rank execute a command."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.execute(command)
        elif self._forward is not None:
            self._forward(rank, encode_command(command))

    def deliver(self, rank: int, data: bytes) -> None:
        """Take encoded events of a rank in another process; may be called from any thread."""
        self._delivered.put((rank, data))
        self._wake()

    def drain(self) -> list[AnyEvent]:
        """Everything the ranks reported since the last call; a `PairId` names the rank."""
        events: list[AnyEvent] = []
        for worker in self._workers.values():
            events.extend(worker.drain())
        while True:
            try:
                _, data = self._delivered.get_nowait()
            except queue.Empty:
                return events
            events.extend(decode_events(data))

    def close(self) -> None:
        """Close the ranks that live here."""
        for worker in self._workers.values():
            worker.close()
