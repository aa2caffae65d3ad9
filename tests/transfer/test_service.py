"""What the core sees of transfers: when they are tried, what they report, how peers that misbehave are met."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvferry_engine.transfer.transport.base import Connector
from kvferry_engine.transfer.transport.local import LocalConnector, LocalHub
from kvferry_engine.wire import messages as wire
from transfer.simulation import Network
from transfer.test_conformance import ids
from transfer.wires import LocalWires


@pytest.fixture
def network() -> Iterator[Network]:
    net = Network(LocalWires())
    yield net
    net.close()


def sent(network: Network, kind: type[wire.Body]) -> list[wire.Body]:
    return [message for _, _, message in network.history if isinstance(message, kind)]


def test_short_prompts_are_computed_here_unless_ferrying_is_forced(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1")

    short = decode.submit(ids(30), ["p1"], force=False)
    forced = decode.submit(ids(30, seed=2), ["p1"], force=True)
    tiny = decode.submit(ids(16, seed=3), ["p1"], force=True)
    network.finish()

    assert (short.num_remote, forced.num_remote, tiny.num_remote) == (0, 16, 0)


def test_a_cached_prompt_is_not_ferried(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1")
    decode.submit(ids(100), [])
    network.settle()

    sequence = decode.submit(ids(100), ["p1"])
    network.finish()

    assert sequence.num_cached == 96
    assert not sent(network, wire.Prefill)


def test_an_engine_does_not_ferry_from_itself(network: Network) -> None:
    decode = network.add("d1")

    sequence = decode.submit(ids(100), ["d1"])
    network.finish()

    assert sequence.num_remote == 0


def test_an_address_where_nobody_answers_ends_in_local_work(network: Network) -> None:
    decode = network.add("d1")

    sequence = decode.submit(ids(100), ["p9"])
    assert decode.service.is_busy()
    assert decode.service.next_timer_s(network.now) == pytest.approx(network.times.ask_s)
    network.finish()

    assert sequence.num_remote == 0
    assert decode.service.next_timer_s(network.now) is None


def test_a_busy_engine_says_so_and_the_next_hint_helps(network: Network) -> None:
    busy, _ = network.add("p1"), network.add("p2")
    decode = network.add("d1")
    busy.estimate_start_s = 60.0

    sequence = decode.submit(ids(100), ["p1", "p2"])
    network.finish()

    assert sent(network, wire.Busy) == [wire.Busy(tid="d1:1.1", retry_after_s=40.0)]
    assert sequence.num_remote == 96


def test_a_prompt_report_names_engine_bytes_and_seconds(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1")
    sequence = decode.submit(ids(100), ["p1"])
    network.run(lambda: sequence.num_remote == 96)
    report = wire.PromptReport(num_prompt_tokens=100)

    decode.service.report(sequence, report)

    assert report.prefill_engine == "name-p1"
    assert report.remote_bytes == 6 * network.layout.block_bytes
    assert 0.0 <= report.transfer_s < 1.0
    assert decode.service.bytes_per_s >= 0.0


def test_a_deadline_that_passes_while_ferrying_ends_both_sides(network: Network) -> None:
    prefill, decode = network.add("p1"), network.add("d1", num_receive_slots=1)
    sequence = decode.submit(ids(600), ["p1"], deadline_s=0.05)

    network.finish()

    assert decode.results[sequence.handle].reason is wire.FinishReason.ABORT
    assert not prefill.scheduler.sequences


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 17},
        {"pair_seq": 40},
        {"d_rank": 5},
        {"head_stop": 7},
        {"p_rank": 3},
    ],
)
def test_an_announcement_against_the_rules_closes_the_pair_and_work_goes_on(
    network: Network, change: dict[str, int]
) -> None:
    network.add("p1")
    decode = network.add("d1")
    changed: list[wire.Body] = []

    def tamper(src: str, dst: str, message: wire.Body) -> wire.Body:
        if isinstance(message, wire.Chunk) and not changed:
            changed.append(message)
            return msgspec.structs.replace(message, **change)
        return message

    network.tamper = tamper
    sequence = decode.submit(ids(200), ["p1"])
    network.finish()

    assert decode.results[sequence.handle].reason is wire.FinishReason.LENGTH
    assert sent(network, wire.PairClosed)
    after = decode.submit(ids(100, seed=5), ["p1"])
    network.finish()
    assert after.num_remote == 96


def test_a_chunk_without_credit_closes_the_pair() -> None:
    network = Network(LocalWires(is_manual=True))
    prefill, decode = network.add("p1"), network.add("d1", num_receive_slots=1)
    network.tamper = lambda src, dst, message: (
        msgspec.structs.replace(message, credits=9) if isinstance(message, wire.Credit) else message
    )
    sequence = decode.submit(ids(300), ["p1"])

    network.finish()

    assert decode.results[sequence.handle].reason is wire.FinishReason.LENGTH
    assert sent(network, wire.PairClosed)
    assert prefill.counters.transfers_out <= 1


def test_messages_about_unknown_transfers_are_answered_with_an_abort(network: Network) -> None:
    prefill, decode = network.add("p1"), network.add("d1")
    decode.submit(ids(40), ["p1"])
    network.settle()
    network.history.clear()

    network.post("p1", "d1", wire.Start(tid="d1:77.1"))
    network.post("d1", "p1", wire.Grant(tid="d1:78.1"))
    network.finish()

    assert sent(network, wire.TransferAbort) == [
        wire.TransferAbort(tid="d1:77.1", reason="unknown transfer"),
        wire.TransferAbort(tid="d1:78.1", reason="unknown transfer"),
    ]
    assert not prefill.service.is_busy()


def test_prompts_that_are_not_whole_blocks_are_refused(network: Network) -> None:
    network.add("p1"), network.add("d1")
    network.dial("d1", "addr-p1")
    network.deliver_all()

    for have, upto in ((0, 40), (3, 32), (32, 32), (0, 48)):
        network.post("d1", "p1", wire.Prefill(tid=f"d1:{have}.{upto}", prompt_ids=b"\0" * 4 * 48, have=have, upto=upto))
    network.deliver_all()

    assert len(sent(network, wire.Reject)) == 4


class UnreliableFirstChoice(LocalWires):
    """A preferred transport whose groups never come up, as NCCL between two ranks of one GPU."""

    transports = ("first", "local")

    def connectors(self, boot: str) -> dict[str, Connector]:
        broken = LocalHub()
        broken.faults.refuses_to_open = True
        return {"first": LocalConnector(broken), **super().connectors(boot)}


def test_a_transport_that_does_not_come_up_is_replaced_by_the_next() -> None:
    network = Network(UnreliableFirstChoice())
    network.add("p1")
    decode = network.add("d1")
    decode.submit(ids(100), ["p1"])
    network.finish()
    network.advance(network.times.rejoin_s)

    sequence = decode.submit(ids(100, seed=2), ["p1"])
    network.finish()

    assert sequence.num_remote == 96
    assert [join.transport for join in sent(network, wire.Join)] == ["first", "local"]  # type: ignore[union-attr]
