"""The sending end of one transfer: announce the start, send full blocks as they get KV, stop at a chunk boundary.

QUEUED -> STARTED -> SENDING -> SENT -> END. The blocks stay ordinary evictable cache except while a chunk with them travels;
blocks that are gone before they were sent shorten the transfer. `next_chunk` says what could go next on a rank pair; the
caller picks among transfers (`fairness`), finds and pins the blocks, and tells `announce`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvferry_engine.transfer.protocol.actions import (
    Action,
    Cached,
    CancelSends,
    ComputeFailed,
    Evicted,
    Granted,
    PeerLost,
    Progress,
    SenderEvent,
    Sent,
    StopCompute,
    Tell,
    Tick,
    TransferTimes,
)
from kvferry_engine.transfer.protocol.slices import ChunkRange, ChunkShape, Cursor, Stream
from kvferry_engine.wire.messages import AbortAck, Close, Done, Start, TransferAbort


class SenderState(StrEnum):
    QUEUED = "queued"
    STARTED = "started"
    SENDING = "sending"
    SENT = "sent"
    END = "end"


@dataclass(frozen=True, slots=True)
class NextChunk:
    """A chunk that may be sent now; `seq` counts within (transfer, sender rank, receiver rank)."""

    stream: Stream
    piece: ChunkRange
    seq: int


class Sender:
    """Decides for one PREFILL. Blocks count from the prompt's start; [have_blocks, want_blocks) is asked for."""

    def __init__(
        self,
        *,
        tid: str,
        boot: str,
        have_blocks: int,
        want_blocks: int,
        block_size: int,
        times: TransferTimes,
    ) -> None:
        assert 0 <= have_blocks < want_blocks
        self.tid = tid
        self.boot = boot
        self.state = SenderState.QUEUED
        self.num_inflight = 0
        self.last_sent_s = 0.0
        self._have = have_blocks
        self._limit = want_blocks
        self._block_size = block_size
        self._times = times
        self._ready = 0
        self._is_computed = False
        self._cached_tokens = 0
        self._streams: dict[Stream, Cursor] = {}
        self._by_ranks: dict[tuple[int, int], list[Stream]] = {}
        self._next_seq: dict[tuple[int, int], int] = {}
        self._num_announced = 0
        self._started_s = 0.0
        self._computed_s: float | None = None
        self._deadline_s: float | None = None
        self._owes_ack = False

    @property
    def is_over(self) -> bool:
        """At the end with nothing in flight: it can be forgotten."""
        return self.state is SenderState.END and self.num_inflight == 0

    @property
    def is_live(self) -> bool:
        """May still announce chunks."""
        return self.state in (SenderState.QUEUED, SenderState.STARTED, SenderState.SENDING)

    @property
    def num_blocks_left(self) -> int:
        """Blocks not yet announced on the slowest stream."""
        lowest = min((cursor.next_block for cursor in self._streams.values()), default=self._have)
        return self._limit - lowest

    def next_timer_s(self) -> float | None:
        """When `Tick` is due."""
        if self.state is SenderState.SENDING and self._computed_s is not None:
            return max(self.last_sent_s, self._computed_s) + 2 * self._times.progress_s
        return self._deadline_s

    def next_chunk(self, ranks: tuple[int, int], shape_of: Callable[[Stream], ChunkShape]) -> NextChunk | None:
        """The chunk that could go next from ranks[0] to ranks[1]; among streams the one furthest behind."""
        if self.state is not SenderState.SENDING:
            return None
        best: NextChunk | None = None
        for stream in self._by_ranks.get(ranks, ()):
            piece = self._streams[stream].next_range(min(self._ready, self._limit), shape_of(stream))
            if piece is not None and (best is None or piece.block_start < best.piece.block_start):
                best = NextChunk(stream, piece, self._next_seq.get(ranks, 0))
        return best

    def announce(self, chunk: NextChunk, now: float) -> list[Action]:
        """Note that `chunk` (from `next_chunk`, perhaps with fewer blocks) is being sent; call after its message went out."""
        ranks = (chunk.stream.p_rank, chunk.stream.d_rank)
        self._streams[chunk.stream].advance(chunk.piece)
        self._next_seq[ranks] = chunk.seq + 1
        self._num_announced += 1
        self.num_inflight += 1
        self.last_sent_s = now
        return self._check_sent(now)

    def handle(self, event: SenderEvent, now: float) -> list[Action]:
        """Take one event; what does not fit the state changes nothing."""
        if isinstance(event, Sent):
            return self._on_sent()
        if self.state is SenderState.END:
            return (
                [Tell(self.boot, AbortAck(tid=self.tid))] if isinstance(event, TransferAbort) and self.is_over else []
            )
        match event:
            case Cached() | Progress() | ComputeFailed():
                return self._on_compute(event, now)
            case Granted():
                return self._on_granted(event, now)
            case Evicted():
                return self._on_evicted(event, now)
            case TransferAbort():
                self._owes_ack = True
                return self._end(event.reason)
            case Close():
                return self._end("closed") if self.state is SenderState.SENT else []
            case PeerLost():
                is_untouched = self.state in (SenderState.QUEUED, SenderState.STARTED) and not event.is_dead
                return [] if is_untouched else self._end(event.reason)
            case Tick():
                timer = self.next_timer_s()
                if timer is None or now < timer:
                    return []
                return [Tell(self.boot, TransferAbort(tid=self.tid, reason="timeout")), *self._end("timeout")]

    # --- computing --------------------------------------------------------------------------------------------------

    def _on_compute(self, event: Cached | Progress | ComputeFailed, now: float) -> list[Action]:
        match event:
            case Cached():
                self._ready = max(self._ready, event.num_blocks)
                return self._start(now) if self._ready > self._have else []
            case Progress():
                self._ready = event.num_blocks
                self._cached_tokens = event.cached_tokens
                if event.is_finished and not self._is_computed:
                    self._is_computed = True
                    self._computed_s = now
                    if self.state in (SenderState.QUEUED, SenderState.STARTED):
                        self._deadline_s = now + self._times.closing_s
                return self._start(now) + self._check_sent(now)
            case ComputeFailed():
                if self.state is SenderState.SENT:
                    return []
                return [Tell(self.boot, TransferAbort(tid=self.tid, reason=event.reason)), *self._end(event.reason)]

    def _start(self, now: float) -> list[Action]:
        if self.state is not SenderState.QUEUED:
            return []
        self.state = SenderState.STARTED
        self._started_s = now
        return [Tell(self.boot, Start(tid=self.tid, ready_tokens=self._ready * self._block_size))]

    # --- sending ----------------------------------------------------------------------------------------------------

    def _on_granted(self, event: Granted, now: float) -> list[Action]:
        if self.state is not SenderState.STARTED:
            return []
        self.state = SenderState.SENDING
        self._deadline_s = None
        for stream in event.streams:
            self._streams[stream] = Cursor(self._have, event.num_layers)
            self._by_ranks.setdefault((stream.p_rank, stream.d_rank), []).append(stream)
        self.last_sent_s = now
        return self._check_sent(now)

    def _on_evicted(self, event: Evicted, now: float) -> list[Action]:
        """Wait for the block to be computed again, or send less when no more computing comes."""
        self._ready = min(self._ready, event.block)
        if not self._is_computed or self.state is not SenderState.SENDING:
            return []
        self._limit = min(cursor.next_block for cursor in self._streams.values())
        if self._limit > self._have:
            return self._check_sent(now)
        return [Tell(self.boot, TransferAbort(tid=self.tid, reason="evicted")), *self._end("evicted")]

    def _check_sent(self, now: float) -> list[Action]:
        if self.state is not SenderState.SENDING or any(c.next_block < self._limit for c in self._streams.values()):
            return []
        self.state = SenderState.SENT
        self._deadline_s = now + self._times.closing_s
        actions: list[Action] = []
        if not self._is_computed:
            self._is_computed = True
            actions.append(StopCompute("everything was cached"))
        num_tokens = self._limit * self._block_size
        done = Done(
            tid=self.tid,
            num_chunks=self._num_announced,
            num_tokens=num_tokens,
            computed_tokens=max(num_tokens - self._cached_tokens, 0),
            cached_tokens=min(self._cached_tokens, num_tokens),
            compute_s=max((now if self._computed_s is None else self._computed_s) - self._started_s, 0.0),
        )
        return [Tell(self.boot, done), *actions]

    def _on_sent(self) -> list[Action]:
        assert self.num_inflight > 0
        self.num_inflight -= 1
        return self._ack() if self.state is SenderState.END else []

    def _end(self, reason: str) -> list[Action]:
        self.state = SenderState.END
        self._deadline_s = None
        actions: list[Action] = []
        if not self._is_computed:
            actions.append(StopCompute(reason))
        if self.num_inflight:
            actions.append(CancelSends())
        return actions + self._ack()

    def _ack(self) -> list[Action]:
        if not self._owes_ack or self.num_inflight:
            return []
        self._owes_ack = False
        return [Tell(self.boot, AbortAck(tid=self.tid))]
