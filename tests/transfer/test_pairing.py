"""Pairs open after JOIN_OK, close as a whole, and never come back under an old epoch."""

from __future__ import annotations

from kvferry_engine.transfer.protocol.actions import TransferTimes
from kvferry_engine.transfer.protocol.pairing import (
    CloseGroups,
    OpenGroups,
    PairsDown,
    PairState,
    PairsUp,
    ReceiverPairs,
    SayClosed,
    SenderPairs,
    SendJoin,
)

TIMES = TransferTimes()


def opened(num_groups: int = 2) -> ReceiverPairs:
    pairs = ReceiverPairs(num_groups, TIMES)
    pairs.want(0.0)
    pairs.joined(1, True, "", 0.0)
    for _ in range(num_groups):
        pairs.opened(1, 0.0)
    return pairs


def test_groups_open_after_the_answer_and_are_up_when_all_are() -> None:
    pairs = ReceiverPairs(2, TIMES)

    assert pairs.want(0.0) == [SendJoin(1)]
    assert pairs.want(0.0) == []
    assert pairs.joined(1, True, "", 0.0) == [OpenGroups(1)]
    assert pairs.opened(1, 0.0) == []
    assert pairs.opened(1, 0.0) == [PairsUp()]
    assert pairs.want(0.0) == [PairsUp()]


def test_one_broken_group_closes_all_and_the_next_want_is_a_new_epoch() -> None:
    pairs = opened()

    assert pairs.failed(1, "reset", 5.0) == [CloseGroups(1), SayClosed(1, "reset"), PairsDown("reset")]
    assert pairs.failed(1, "reset", 5.0) == []
    assert pairs.want(5.0) == [SendJoin(2)]


def test_events_of_an_old_epoch_change_nothing() -> None:
    pairs = opened()
    pairs.failed(1, "reset", 5.0)
    pairs.want(5.0)

    assert pairs.joined(1, True, "", 5.0) == []
    assert pairs.opened(1, 5.0) == []
    assert pairs.peer_closed(1, "late", 5.0) == []
    assert pairs.state is PairState.JOINING


def test_a_refused_join_pauses_longer_each_time() -> None:
    pairs = ReceiverPairs(1, TIMES)
    now = 0.0
    for pause in (1.0, 2.0, 4.0):
        pairs.want(now)
        pairs.joined(pairs.epoch, False, "other model", now)
        assert not pairs.can_join(now + pause - 0.01)
        now += pause
        assert pairs.can_join(now)


def test_a_join_that_takes_too_long_is_given_up() -> None:
    pairs = ReceiverPairs(1, TIMES)
    pairs.want(0.0)

    assert pairs.tick(TIMES.join_s - 0.1) == []
    assert PairsDown("join took too long") in pairs.tick(TIMES.join_s)


def test_a_known_process_starts_above_its_last_epoch() -> None:
    assert ReceiverPairs(1, TIMES, epoch=7).want(0.0) == [SendJoin(8)]


def test_a_sender_ignores_old_joins_and_replaces_its_groups_for_new_ones() -> None:
    pairs = SenderPairs()

    assert pairs.join(3, 1) == [OpenGroups(3)]
    assert pairs.opened(3) == [PairsUp()]
    assert pairs.join(3, 1) == []
    assert pairs.join(2, 1) == []
    assert pairs.join(4, 1) == [CloseGroups(3), PairsDown("epoch 4 begins"), OpenGroups(4)]
    assert pairs.failed(3, "late") == []
    assert pairs.failed(4, "reset") == [CloseGroups(4), SayClosed(4, "reset"), PairsDown("reset")]
