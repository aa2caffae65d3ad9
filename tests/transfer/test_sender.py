"""What the sending end does with its prompt, its blocks and its receiver."""

from __future__ import annotations

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
from kvferry_engine.transfer.protocol.fairness import urgency
from kvferry_engine.transfer.protocol.sender import NextChunk, Sender, SenderState
from kvferry_engine.transfer.protocol.slices import ChunkRange, ChunkShape, Stream
from kvferry_engine.wire import messages as wire

TIMES = TransferTimes()
STREAM = Stream(0, 0, 0, 2)
SHAPE = ChunkShape(2, 3)


class Case:
    """A sender asked for blocks 1 to 5, and a clock."""

    def __init__(self, *, want: int = 5, tid: str = "d:1.1") -> None:
        self.now = 0.0
        self.sender = Sender(tid=tid, boot="d", have_blocks=1, want_blocks=want, block_size=16, times=TIMES)

    def tell(self, *events: SenderEvent) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions = self.sender.handle(event, self.now)
        return actions

    def granted(self) -> Case:
        self.tell(Progress(1, False), Granted((STREAM,), 3))
        return self

    def next(self) -> NextChunk | None:
        return self.sender.next_chunk((0, 0), lambda stream: SHAPE)

    def send_all(self) -> list[Action]:
        actions: list[Action] = []
        while (chunk := self.next()) is not None:
            actions += self.sender.announce(chunk, self.now)
        return actions

    def messages(self, actions: list[Action]) -> list[wire.Body]:
        return [action.message for action in actions if isinstance(action, Tell)]


def test_start_is_told_just_before_the_first_chunk() -> None:
    assert Case().tell(Progress(0, False)) == [Tell("d", wire.Start(tid="d:1.1"))]


def test_start_is_told_at_once_when_blocks_are_cached() -> None:
    assert Case().tell(Cached(3)) == [Tell("d", wire.Start(tid="d:1.1", ready_tokens=48))]
    assert Case().tell(Cached(1)) == []


def test_nothing_is_sent_before_the_grant() -> None:
    case = Case()
    case.tell(Progress(5, True))

    assert case.next() is None


def test_blocks_go_as_they_are_computed_and_done_follows_the_last() -> None:
    case = Case().granted()
    assert case.next() is None

    case.tell(Progress(4, False))
    assert case.next() == NextChunk(STREAM, ChunkRange(1, 3, 0, 3), 0)
    assert case.send_all() == []
    case.now = 2.0
    case.tell(Progress(5, True, cached_tokens=32))
    (done,) = case.messages(case.send_all())

    assert done == wire.Done(
        tid="d:1.1", num_chunks=3, num_tokens=80, computed_tokens=48, cached_tokens=32, compute_s=2.0
    )
    assert case.sender.state is SenderState.SENT


def test_everything_cached_stops_the_computing() -> None:
    case = Case()
    case.tell(Cached(5), Granted((STREAM,), 3))

    actions = case.send_all()

    assert StopCompute("everything was cached") in actions
    assert case.sender.state is SenderState.SENT
    assert case.tell(ComputeFailed("aborted")) == []


def test_close_ends_it_when_all_payloads_left() -> None:
    case = Case().granted()
    case.tell(Progress(5, True))
    case.send_all()

    case.tell(wire.Close(tid="d:1.1"))
    assert not case.sender.is_over
    case.tell(Sent(), Sent())

    assert case.sender.is_over


def test_an_abort_stops_at_a_chunk_boundary_and_is_acknowledged_when_nothing_travels() -> None:
    case = Case().granted()
    case.tell(Progress(3, False))
    case.send_all()

    assert case.tell(wire.TransferAbort(tid="d:1.1", reason="gone")) == [StopCompute("gone"), CancelSends()]
    assert case.next() is None
    assert case.tell(Sent()) == [Tell("d", wire.AbortAck(tid="d:1.1"))]
    assert case.sender.is_over


def test_blocks_evicted_while_computing_are_waited_for() -> None:
    case = Case().granted()
    case.tell(Progress(4, False), Evicted(2))

    assert case.next() == NextChunk(STREAM, ChunkRange(1, 2, 0, 3), 0)
    case.send_all()
    assert case.next() is None
    case.tell(Progress(4, False))
    assert case.next() == NextChunk(STREAM, ChunkRange(2, 4, 0, 3), 1)


def test_blocks_evicted_after_computing_shorten_the_transfer() -> None:
    case = Case().granted()
    case.tell(Progress(3, False))
    case.send_all()
    case.tell(Progress(5, True))

    (done,) = case.messages(case.tell(Evicted(3)))

    assert isinstance(done, wire.Done)
    assert (done.num_tokens, done.num_chunks) == (48, 1)


def test_all_blocks_evicted_is_an_abort() -> None:
    case = Case().granted()
    case.tell(Progress(5, True))

    assert case.messages(case.tell(Evicted(1))) == [wire.TransferAbort(tid="d:1.1", reason="evicted")]


def test_a_pair_lost_before_sending_changes_nothing() -> None:
    case = Case()
    case.tell(Progress(1, False))

    assert case.tell(PeerLost("d", "reset", False)) == []
    assert case.tell(PeerLost("d", "gone", True)) == [StopCompute("gone")]


def test_a_prompt_that_fails_is_an_abort() -> None:
    case = Case().granted()

    actions = case.tell(ComputeFailed("deadline exceeded"))

    assert case.messages(actions) == [wire.TransferAbort(tid="d:1.1", reason="deadline exceeded")]


def test_a_receiver_that_never_closes_is_forgotten() -> None:
    case = Case().granted()
    case.tell(Progress(5, True))
    case.send_all()
    case.tell(Sent(), Sent())

    case.now = TIMES.closing_s
    case.tell(Tick())

    assert case.sender.is_over


def test_a_short_transfer_goes_before_a_long_one_until_that_has_waited() -> None:
    short, long = Case(want=3, tid="short").granted(), Case(want=40, tid="long").granted()

    assert urgency(short.sender, 0.0) < urgency(long.sender, 0.0)
    short.sender.last_sent_s = 3.0
    assert urgency(long.sender, 3.0) < urgency(short.sender, 3.0)
