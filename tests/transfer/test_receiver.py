"""What the receiving end does with answers, silence and trouble."""

from __future__ import annotations

import pytest

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
)
from kvferry_engine.transfer.protocol.receiver import Receiver, ReceiverState
from kvferry_engine.transfer.protocol.slices import Stream
from kvferry_engine.wire import messages as wire

TIMES = TransferTimes()
STREAMS = (Stream(0, 0, 0, 1), Stream(0, 1, 1, 2))
TID = "d:1.1"


def chunk(
    d_rank: int, seq: int, start: int, stop: int, *, layers: tuple[int, int] = (0, 2), tid: str = TID
) -> wire.Chunk:
    return wire.Chunk(
        tid=tid,
        seq=seq,
        pair_seq=seq,
        p_rank=0,
        d_rank=d_rank,
        block_start=start,
        block_stop=stop,
        layer_start=layers[0],
        layer_stop=layers[1],
        head_start=d_rank,
        head_stop=d_rank + 1,
        num_bytes=1,
    )


class Case:
    """A receiver with two candidates that has 1 of 5 blocks, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.receiver = Receiver(key="d:1", num_candidates=2, have_blocks=1, want_blocks=5, block_size=16, times=TIMES)

    def tell(self, *events: ReceiverEvent) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions = self.receiver.handle(event, self.now)
        return actions

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.tell(Tick())

    def asked(self) -> Case:
        self.tell(Begin(), PeerReady("p1"))
        return self

    def granted(self) -> Case:
        self.asked().tell(wire.Queued(tid=TID), PairReady(STREAMS, 2), wire.Start(tid=TID), Room(True))
        assert self.receiver.state is ReceiverState.GRANTED
        return self


def test_the_straight_way_ends_ready() -> None:
    case = Case()

    assert case.tell(Begin()) == [Reach(0)]
    assert case.tell(PeerReady("p1")) == [Ask("p1", TID, 1)]
    assert case.tell(wire.Queued(tid=TID, est_start_s=1.0)) == []
    assert case.tell(PairReady(STREAMS, 2)) == []
    assert case.tell(wire.Start(tid=TID)) == [Reserve(5)]
    assert case.tell(Room(True)) == [Tell("p1", wire.Grant(tid=TID))]
    case.tell(chunk(0, 0, 1, 5), chunk(1, 0, 1, 3), chunk(1, 1, 3, 5))
    assert case.tell(Landed(chunk(0, 0, 1, 5), Outcome.OK)) == []
    assert case.tell(Landed(chunk(1, 0, 1, 3), Outcome.OK)) == [Commit(3)]
    assert case.tell(wire.Done(tid=TID, num_chunks=3, num_tokens=80)) == []
    assert case.tell(Landed(chunk(1, 1, 3, 5), Outcome.OK)) == [
        Commit(5),
        Tell("p1", wire.Close(tid=TID)),
        Finish("done"),
    ]
    assert case.receiver.state is ReceiverState.READY


def test_a_block_counts_only_when_all_its_layers_are_there() -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 5), chunk(1, 0, 1, 2, layers=(0, 1)), chunk(1, 1, 1, 2, layers=(1, 2)))
    case.tell(Landed(chunk(0, 0, 1, 5), Outcome.OK))

    assert case.tell(Landed(chunk(1, 0, 1, 2, layers=(0, 1)), Outcome.OK)) == []
    assert case.tell(Landed(chunk(1, 1, 1, 2, layers=(1, 2)), Outcome.OK)) == [Commit(2)]


def test_payloads_may_land_in_any_order() -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 2), chunk(0, 1, 2, 3), chunk(1, 0, 1, 3))
    case.tell(Landed(chunk(1, 0, 1, 3), Outcome.OK))

    assert case.tell(Landed(chunk(0, 1, 2, 3), Outcome.OK)) == []
    assert case.tell(Landed(chunk(0, 0, 1, 2), Outcome.OK)) == [Commit(3)]


@pytest.mark.parametrize(
    "answer", [wire.Busy(tid=TID), wire.Reject(tid=TID, message="no"), PeerRefused("no"), PeerLost("p1", "gone", True)]
)
def test_a_candidate_that_does_not_want_is_left_for_the_next(answer: ReceiverEvent) -> None:
    case = Case().asked()

    assert Reach(1) in case.tell(answer)
    assert case.tell(PeerReady("p2")) == [Ask("p2", "d:1.2", 1)]


def test_silence_after_asking_is_an_answer() -> None:
    case = Case().asked()

    assert case.wait(TIMES.ask_s - 0.1) == []
    assert case.wait(0.1) == [Tell("p1", wire.TransferAbort(tid=TID, reason="timeout")), Reach(1)]


def test_a_start_may_be_as_late_as_announced_plus_slack() -> None:
    case = Case().asked()
    case.tell(wire.Queued(tid=TID, est_start_s=5.0))

    assert case.wait(5.0 + TIMES.start_slack_s - 0.1) == []
    assert Reach(1) in case.wait(0.1)


def test_no_candidate_left_means_local() -> None:
    case = Case().asked()
    case.tell(wire.Busy(tid=TID))

    assert case.tell(PeerRefused("no")) == [Finish("no")]
    assert case.receiver.state is ReceiverState.SALVAGED


def test_no_room_is_tried_again_later_and_not_for_ever() -> None:
    case = Case()
    case.tell(Begin())
    for attempt in range(TIMES.max_room_retries + 1):
        tid = f"d:1.{attempt + 1}"
        case.tell(PeerReady("p1"), PairReady(STREAMS, 2), wire.Start(tid=tid))
        actions = case.tell(Room(False))
        assert actions[0] == Tell("p1", wire.TransferAbort(tid=tid, reason="no room", retry=True))
        if attempt < TIMES.max_room_retries:
            assert case.wait(TIMES.room_retry_s * 2**attempt) == [Reach(0)]

    assert actions[1:] == [Finish("no room")]


def test_abort_wins_over_done() -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 5), chunk(1, 0, 1, 5), wire.Done(tid=TID, num_chunks=2, num_tokens=80))

    actions = case.tell(wire.TransferAbort(tid=TID, reason="failed"))

    assert actions == [Tell("p1", wire.AbortAck(tid=TID)), Reach(1)]
    assert case.tell(Landed(chunk(0, 0, 1, 5), Outcome.OK)) == []


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.TOMBSTONE, Outcome.FAILED])
def test_a_bad_payload_keeps_what_was_good_and_asks_another(outcome: Outcome) -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 3), chunk(1, 0, 1, 3), chunk(0, 1, 3, 5))
    case.tell(Landed(chunk(0, 0, 1, 3), Outcome.OK), Landed(chunk(1, 0, 1, 3), Outcome.OK))

    assert Reach(1) in case.tell(Landed(chunk(0, 1, 3, 5), outcome))
    assert case.tell(PeerReady("p2")) == [Ask("p2", "d:1.2", 3)]


@pytest.mark.parametrize(
    "wrong",
    [chunk(0, 1, 1, 3), chunk(0, 0, 2, 3), chunk(0, 0, 1, 6), chunk(0, 0, 1, 2, layers=(1, 2)), chunk(2, 0, 1, 3)],
)
def test_a_gap_ends_the_attempt(wrong: wire.Chunk) -> None:
    case = Case().granted()

    actions = case.tell(wrong)

    assert actions == [Tell("p1", wire.TransferAbort(tid=TID, reason="chunk out of order")), Reach(1)]


@pytest.mark.parametrize(("num_chunks", "num_tokens"), [(3, 80), (2, 64), (2, 96)])
def test_done_must_match_what_came(num_chunks: int, num_tokens: int) -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 5), chunk(1, 0, 1, 5))
    case.tell(Landed(chunk(0, 0, 1, 5), Outcome.OK), Landed(chunk(1, 0, 1, 5), Outcome.OK))

    actions = case.tell(wire.Done(tid=TID, num_chunks=num_chunks, num_tokens=num_tokens))

    assert not any(isinstance(action, Tell) and isinstance(action.message, wire.Close) for action in actions)
    assert case.receiver.state is ReceiverState.SALVAGED
    assert case.receiver.watermark == 5


def test_a_shorter_done_is_ready_with_less() -> None:
    case = Case().granted()
    case.tell(chunk(0, 0, 1, 3), chunk(1, 0, 1, 3))
    case.tell(Landed(chunk(0, 0, 1, 3), Outcome.OK), Landed(chunk(1, 0, 1, 3), Outcome.OK))

    case.tell(wire.Done(tid=TID, num_chunks=2, num_tokens=48))

    assert case.receiver.state is ReceiverState.READY
    assert case.receiver.watermark == 3


def test_a_pair_lost_before_the_grant_is_joined_again() -> None:
    case = Case().asked()
    case.tell(wire.Queued(tid=TID), PairReady(STREAMS, 2))

    assert case.tell(PeerLost("p1", "reset", False)) == [Rejoin("p1")]
    assert case.tell(wire.Start(tid=TID)) == []
    assert case.tell(PairReady(STREAMS, 2)) == [Reserve(5)]


def test_a_pair_lost_after_the_grant_ends_the_attempt() -> None:
    case = Case().granted()

    assert Reach(1) in case.tell(PeerLost("p1", "reset", False))


def test_a_granted_transfer_that_brings_nothing_is_left() -> None:
    case = Case().granted()

    assert case.wait(TIMES.progress_s - 0.1) == []
    assert Reach(1) in case.wait(0.1)


def test_the_owner_ends_it_in_any_state_without_finish() -> None:
    for case in (Case(), Case().asked(), Case().granted()):
        actions = case.tell(OwnerAbort("gone"))
        assert not any(isinstance(action, Finish) for action in actions)
        assert case.receiver.state is ReceiverState.DRAINED
        assert case.receiver.next_timer_s() is None
        assert case.tell(wire.Start(tid=TID), Tick()) == []
