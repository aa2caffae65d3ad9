"""The receiving end of one sequence's transfer, over as many candidates as it takes: ask, wait, grant, fill, or fall back.

NEW -> ASKED -> WAIT -> GRANTED -> READY, with two other ends: SALVAGED (what arrived is kept, the rest is computed here) and
DRAINED (the owner gave up). A candidate that refuses, is late, breaks or corrupts is left for the next one, keeping the blocks
that are complete. Wire messages must be those of the current `tid`; the caller drops others.
"""

from __future__ import annotations

from enum import StrEnum

from kvferry_engine.transfer.protocol.actions import (
    Action,
    Ask,
    Begin,
    Commit,
    Finish,
    Landed,
    Outcome,
    OwnerAbort,
    PairReady,
    PeerLost,
    PeerReady,
    PeerRefused,
    Reach,
    ReceiverEvent,
    Rejoin,
    Reserve,
    Room,
    Tell,
    Tick,
    TransferTimes,
    range_of,
)
from kvferry_engine.transfer.protocol.slices import ChunkRange, Cursor
from kvferry_engine.wire.messages import (
    AbortAck,
    Busy,
    Chunk,
    Close,
    Done,
    Grant,
    Queued,
    Reject,
    Start,
    TransferAbort,
)


class ReceiverState(StrEnum):
    NEW = "new"
    ASKED = "asked"
    WAIT = "wait"
    GRANTED = "granted"
    READY = "ready"
    SALVAGED = "salvaged"
    DRAINED = "drained"


OVER = frozenset({ReceiverState.READY, ReceiverState.SALVAGED, ReceiverState.DRAINED})


class _Landed:
    """What of one stream is complete; payloads may complete in any order, only an unbroken run counts."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._ahead: list[ChunkRange] = []

    def add(self, piece: ChunkRange) -> None:
        self._ahead.append(piece)
        while following := [each for each in self._ahead if self.cursor.accepts(each)]:
            self._ahead.remove(following[0])
            self.cursor.advance(following[0])


class Receiver:
    """Decides for one sequence. `watermark` is the number of leading blocks that are complete on all ranks and heads."""

    def __init__(
        self,
        *,
        key: str,
        num_candidates: int,
        have_blocks: int,
        want_blocks: int,
        block_size: int,
        times: TransferTimes,
    ) -> None:
        assert 0 <= have_blocks < want_blocks
        self.state = ReceiverState.NEW
        self.watermark = have_blocks
        self.boot = ""
        self.done: Done | None = None
        self.started_s: float | None = None
        self._key = key
        self._num_candidates = num_candidates
        self._want = want_blocks
        self._block_size = block_size
        self._times = times
        self._attempt = 0
        self._candidate = -1
        self._room_retries = 0
        self._deadline_s: float | None = None
        self._is_pausing = False
        self._reset_attempt()

    def _reset_attempt(self) -> None:
        self.boot = ""
        self.done = None
        self.started_s = None
        self._pair: PairReady | None = None
        self._announced: dict[tuple[int, int, int], Cursor] = {}
        self._landed: dict[tuple[int, int, int], _Landed] = {}
        self._next_seq: dict[tuple[int, int], int] = {}
        self._num_announced = 0
        self._num_landed = 0
        self._last_news_s = 0.0

    @property
    def tid(self) -> str:
        """Id of the current attempt."""
        return f"{self._key}.{self._attempt}"

    @property
    def is_over(self) -> bool:
        """In a state without further events."""
        return self.state in OVER

    def next_timer_s(self) -> float | None:
        """When `Tick` is due, on the caller's clock."""
        if self.state is not ReceiverState.GRANTED:
            return None if self.is_over else self._deadline_s
        return self._last_news_s + self._times.progress_s

    def handle(self, event: ReceiverEvent, now: float) -> list[Action]:
        """Take one event; events that do not fit the state (late, repeated) change nothing."""
        if self.is_over:
            return []
        match event:
            case Begin():
                return self._reach_next(now, "no hint")
            case PeerReady() | PeerRefused() | PairReady() | PeerLost():
                return self._on_peer(event, now)
            case Queued() | Busy() | Reject() | Start():
                return self._on_answer(event, now)
            case Room():
                return self._on_room(event, now)
            case Chunk():
                return self._on_chunk(event, now)
            case Landed():
                return self._on_landed(event, now)
            case Done():
                return self._on_done(event, now)
            case TransferAbort():
                return [
                    Tell(self.boot, AbortAck(tid=event.tid)),
                    *self._leave(f"peer: {event.reason}", now, tell=False),
                ]
            case AbortAck():
                return []
            case OwnerAbort():
                actions = self._abort_peer(event.reason)
                self.state = ReceiverState.DRAINED
                return actions
            case Tick():
                return self._on_tick(now)

    # --- candidates -------------------------------------------------------------------------------------------------

    def _reach_next(self, now: float, reason: str) -> list[Action]:
        self._candidate += 1
        self._room_retries = 0
        return self._reach(now, reason)

    def _reach(self, now: float, reason: str) -> list[Action]:
        self._reset_attempt()
        self._is_pausing = False
        if self._candidate >= self._num_candidates or self.watermark >= self._want:
            self.state = ReceiverState.SALVAGED
            return [Finish(reason)]
        self.state = ReceiverState.NEW
        self._attempt += 1
        self._deadline_s = now + self._times.ask_s
        return [Reach(self._candidate)]

    def _abort_peer(self, reason: str, *, retry: bool = False) -> list[Action]:
        if self.state in (ReceiverState.ASKED, ReceiverState.WAIT, ReceiverState.GRANTED):
            return [Tell(self.boot, TransferAbort(tid=self.tid, reason=reason, retry=retry))]
        return []

    def _leave(self, reason: str, now: float, *, tell: bool) -> list[Action]:
        """Give this candidate up, keep what is complete, go on with the next one or here."""
        actions = self._abort_peer(reason) if tell else []
        return actions + self._reach_next(now, reason)

    def _on_peer(self, event: PeerReady | PeerRefused | PairReady | PeerLost, now: float) -> list[Action]:
        match event:
            case PeerReady(boot) if self.state is ReceiverState.NEW and not self._is_pausing:
                self.boot = boot
                self.state = ReceiverState.ASKED
                return [Ask(boot, self.tid, self.watermark)]
            case PeerRefused(reason) if self.state in (ReceiverState.NEW, ReceiverState.ASKED, ReceiverState.WAIT):
                return self._leave(reason, now, tell=True)
            case PairReady() if self.state in (ReceiverState.ASKED, ReceiverState.WAIT):
                self._pair = event
                return self._ask_for_room()
            case PeerLost(boot, _, False) if boot == self.boot and self.state in (
                ReceiverState.ASKED,
                ReceiverState.WAIT,
            ):
                self._pair = None
                return [Rejoin(boot)]
            case PeerLost(boot, reason, is_dead) if boot == self.boot:
                return self._leave(reason, now, tell=not is_dead)
            case _:
                return []

    def _on_answer(self, event: Queued | Busy | Reject | Start, now: float) -> list[Action]:
        if self.state not in (ReceiverState.ASKED, ReceiverState.WAIT):
            return []
        match event:
            case Queued():
                if self.started_s is None:
                    self.state = ReceiverState.WAIT
                    self._deadline_s = now + event.est_start_s + self._times.start_slack_s
                return []
            case Start():
                self.state = ReceiverState.WAIT
                self.started_s = now
                self._deadline_s = now + self._times.join_s
                return self._ask_for_room()
            case Busy():
                return self._leave("peer busy", now, tell=False)
            case Reject():
                return self._leave(f"peer refused: {event.message}", now, tell=False)

    # --- filling ----------------------------------------------------------------------------------------------------

    def _ask_for_room(self) -> list[Action]:
        if self._pair is None or self.started_s is None:
            return []
        return [Reserve(self._want)]

    def _on_room(self, event: Room, now: float) -> list[Action]:
        if self._pair is None or self.state is not ReceiverState.WAIT:
            return []
        if not event.is_reserved:
            return self._pause_for_room(now)
        self.state = ReceiverState.GRANTED
        for stream in self._pair.streams:
            self._announced[stream.key] = Cursor(self.watermark, self._pair.num_layers)
            self._landed[stream.key] = _Landed(Cursor(self.watermark, self._pair.num_layers))
        self._last_news_s = now
        return [Tell(self.boot, Grant(tid=self.tid))]

    def _pause_for_room(self, now: float) -> list[Action]:
        actions = self._abort_peer("no room", retry=True)
        if self._room_retries >= self._times.max_room_retries:
            self.state = ReceiverState.SALVAGED
            return [*actions, Finish("no room")]
        self.state = ReceiverState.NEW
        self._is_pausing = True
        self._deadline_s = now + self._times.room_retry_s * 2**self._room_retries
        self._room_retries += 1
        return actions

    def _on_chunk(self, event: Chunk, now: float) -> list[Action]:
        if self.state is not ReceiverState.GRANTED:
            return []
        cursor = self._announced.get((event.d_rank, event.head_start, event.head_stop))
        ranks = (event.p_rank, event.d_rank)
        is_in_order = event.seq == self._next_seq.get(ranks, 0) and self.done is None
        if cursor is None or not is_in_order or not cursor.accepts(range_of(event)) or event.block_stop > self._want:
            return self._leave("chunk out of order", now, tell=True)
        cursor.advance(range_of(event))
        self._next_seq[ranks] = event.seq + 1
        self._last_news_s = now
        self._num_announced += 1
        return []

    def _on_landed(self, event: Landed, now: float) -> list[Action]:
        if self.state is not ReceiverState.GRANTED or event.chunk.tid != self.tid:
            return []
        if event.outcome is not Outcome.OK:
            return self._leave(f"chunk {event.outcome.value}", now, tell=True)
        chunk = event.chunk
        self._landed[(chunk.d_rank, chunk.head_start, chunk.head_stop)].add(range_of(chunk))
        self._num_landed += 1
        self._last_news_s = now
        actions: list[Action] = []
        watermark = min(landed.cursor.next_block for landed in self._landed.values())
        if watermark > self.watermark:
            self.watermark = watermark
            actions.append(Commit(watermark))
        return actions + self._check_done(now)

    def _on_done(self, event: Done, now: float) -> list[Action]:
        if self.state is not ReceiverState.GRANTED:
            return []
        self.done = event
        if event.num_chunks != self._num_announced:
            return self._leave(f"{event.num_chunks} chunks sent, {self._num_announced} announced", now, tell=True)
        self._last_news_s = now
        return self._check_done(now)

    def _check_done(self, now: float) -> list[Action]:
        if self.done is None or self._num_landed < self.done.num_chunks:
            return []
        if self.watermark * self._block_size != self.done.num_tokens:
            return self._leave(
                f"{self.done.num_tokens} tokens sent, blocks up to {self.watermark} complete", now, tell=True
            )
        self.state = ReceiverState.READY
        return [Tell(self.boot, Close(tid=self.tid)), Finish("done")]

    # --- time -------------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Action]:
        timer = self.next_timer_s()
        if timer is None or now < timer:
            return []
        if self._is_pausing:
            return self._reach(now, "no room")
        reason = "no progress" if self.state is ReceiverState.GRANTED else "timeout"
        return self._leave(reason, now, tell=True)
