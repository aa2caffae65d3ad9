"""Commands and events survive the way to a rank in another process."""

from __future__ import annotations

import msgspec
import pytest

from kvferry_engine.transfer import commands
from kvferry_engine.transfer.protocol.actions import Outcome

PAIR = commands.PairId("p1", "d1", 1, 0, 3)
PAYLOAD = {
    "pair_seq": 5,
    "slot": 2,
    "num_bytes": 4096,
    "mark": (1 << 63) - 1,
    "blocks": b"\x01\x00\x00\x00",
    "layer_start": 0,
    "layer_stop": 4,
    "head_start": 1,
    "head_stop": 2,
}


@pytest.mark.parametrize(
    "command",
    [
        commands.OpenPair(PAIR, is_sender=True, transport="gloo", store_address="10.0.0.1:7080"),
        commands.ClosePair(PAIR),
        commands.PostReceive(PAIR, pair_seq=5, slot=1, num_bytes=64),
        commands.Scatter(PAIR, **PAYLOAD),
        commands.Send(PAIR, **PAYLOAD),
        commands.Launch(PAIR, 5),
        commands.CancelSend(PAIR, 5),
    ],
)
def test_a_command_arrives_as_it_was(command: commands.AnyCommand) -> None:
    assert commands.decode_command(commands.encode_command(command)) == command


def test_events_arrive_as_they_were() -> None:
    events: list[commands.AnyEvent] = [
        commands.PairOpened(PAIR),
        commands.PairBroken(PAIR, "reset"),
        commands.ReceivePosted(PAIR, 1),
        commands.PayloadReceived(PAIR, 1, True),
        commands.Scattered(PAIR, 1, Outcome.TOMBSTONE),
        commands.PayloadSent(PAIR, 1, False),
    ]

    assert commands.decode_events(commands.encode_events(events)) == events


def test_garbage_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        commands.decode_command(b"\x81\xa1")


def test_a_prefix_differs_by_every_part() -> None:
    others = [
        commands.PairId("p2", "d1", 1, 0, 3),
        commands.PairId("p1", "d2", 1, 0, 3),
        commands.PairId("p1", "d1", 0, 0, 3),
        commands.PairId("p1", "d1", 1, 1, 3),
        commands.PairId("p1", "d1", 1, 0, 4),
    ]

    assert len({PAIR.prefix, *(other.prefix for other in others)}) == 6
