"""One set of statements about a transfer, whatever carries the payloads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry_engine.transfer.protocol.actions import TransferTimes
from kvferry_engine.transfer.transport.nccl import probe
from kvferry_engine.wire import messages as wire
from transfer.simulation import Layout, Network
from transfer.wires import Fault, GlooWires, LocalWires, Wires


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_wires(name: str) -> Wires:
    if name == "local":
        return LocalWires()
    if name == "nccl":
        reason = probe(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), 1)
        pytest.skip(f"NCCL: {reason}" if reason else "NCCL: needs two GPUs, one per engine process")
    return GlooWires()


@pytest.fixture(params=["local", "gloo", "nccl"])
def wires(request: pytest.FixtureRequest) -> Wires:
    return make_wires(request.param)


@pytest.fixture
def network(wires: Wires) -> Iterator[Network]:
    net = Network(wires)
    yield net
    net.close()


def test_a_prompt_is_ferried_byte_for_byte(network: Network) -> None:
    prefill, decode = network.add("p1"), network.add("d1")

    sequence = decode.submit(ids(100), ["p1"])
    network.finish()

    assert sequence.num_remote == 96
    assert decode.checked_blocks >= 6
    assert decode.counters.transfers_in == prefill.counters.transfers_out == 1
    assert decode.counters.transfer_bytes_in == prefill.counters.transfer_bytes_out == 6 * network.layout.block_bytes
    assert decode.results[sequence.handle].reason is wire.FinishReason.LENGTH


def test_a_second_prompt_ferries_only_what_is_missing(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1")
    decode.submit(ids(100), ["p1"])
    network.settle()

    sequence = decode.submit(ids(100)[:64] + ids(80, seed=9), ["p1"])
    network.finish()

    assert sequence.num_cached == 64
    assert sequence.num_remote == 64


def test_many_prompts_at_once_from_two_engines(network: Network) -> None:
    network.add("p1", num_blocks=256)
    network.add("p2", num_blocks=256)
    decode = network.add("d1", num_blocks=256)
    sequences = [decode.submit(ids(40 + 13 * n, seed=n), [f"p{1 + n % 2}"]) for n in range(12)]

    network.finish()

    assert all(sequence.num_remote == (sequence.num_prompt - 1) // 16 * 16 for sequence in sequences)
    assert decode.counters.transfers_in == 12


def test_both_engines_prefill_for_each_other(network: Network) -> None:
    one, other = network.add("e1", num_blocks=128), network.add("e2", num_blocks=128)
    first = [one.submit(ids(70, seed=n), ["e2"]) for n in range(4)]
    second = [other.submit(ids(70, seed=10 + n), ["e1"]) for n in range(4)]

    network.finish()

    assert all(sequence.num_remote == 64 for sequence in first + second)


@pytest.mark.parametrize(
    ("p_ranks", "d_ranks", "heads"),
    [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 3), (4, 2, 2), (1, 4, 2), (2, 6, 6)],
)
def test_different_tensor_parallel_sizes(wires: Wires, p_ranks: int, d_ranks: int, heads: int) -> None:
    network = Network(wires, layout=Layout(num_kv_heads=heads))
    network.add("p1", tensor_parallel=p_ranks)
    decode = network.add("d1", tensor_parallel=d_ranks)
    sequences = [decode.submit(ids(90, seed=n), ["p1"]) for n in range(3)]

    network.finish()

    assert all(sequence.num_remote == 80 for sequence in sequences)
    network.close()


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_in_other_processes_follow_commands(wires: Wires, p_ranks: int, d_ranks: int) -> None:
    network = Network(wires)
    network.add("p1", tensor_parallel=p_ranks, has_remote_ranks=True)
    decode = network.add("d1", tensor_parallel=d_ranks, has_remote_ranks=True)
    aborted = decode.submit(ids(200, seed=7), ["p1"])
    sequences = [decode.submit(ids(90, seed=n), ["p1"]) for n in range(3)]
    for _ in range(6):
        network.turn()

    decode.abort(aborted)
    network.finish()

    assert all(sequence.num_remote == 80 for sequence in sequences)
    network.close()


@pytest.mark.parametrize("slot_share", [1, 2, 3, 6, 12])
def test_slots_smaller_than_a_block_split_layers_and_heads(wires: Wires, slot_share: int) -> None:
    layout = Layout(num_layers=3, num_kv_heads=4)
    network = Network(wires, layout=layout)
    network.add("p1", tensor_parallel=2, slot_bytes=layout.block_bytes)
    decode = network.add("d1", slot_bytes=layout.block_bytes // slot_share)
    sequence = decode.submit(ids(70), ["p1"])

    network.finish()

    assert sequence.num_remote == 64
    network.close()


def test_one_slot_is_enough(network: Network) -> None:
    network.add("p1", num_send_slots=1)
    network.add("p2", num_send_slots=1)
    decode = network.add("d1", num_receive_slots=1, num_blocks=128)
    sequences = [decode.submit(ids(100, seed=n), [f"p{1 + n % 2}"]) for n in range(6)]

    network.finish()

    assert all(sequence.num_remote == 96 for sequence in sequences)


@pytest.mark.parametrize("num_turns", range(12))
def test_an_abort_at_any_moment_leaves_nothing(network: Network, num_turns: int) -> None:
    prefill, decode = network.add("p1"), network.add("d1", num_receive_slots=1)
    sequence = decode.submit(ids(300), ["p1"])
    other = decode.submit(ids(60, seed=5), ["p1"])
    for _ in range(num_turns):
        network.turn()

    decode.abort(sequence)
    network.finish()

    assert decode.results[other.handle].reason is wire.FinishReason.LENGTH
    assert prefill.counters.transfers_out <= 2


@pytest.mark.parametrize("num_turns", [1, 3, 5, 8])
def test_a_dying_sender_leaves_a_prefix_that_is_used(network: Network, num_turns: int) -> None:
    network.add("p1")
    decode = network.add("d1", num_receive_slots=1, num_blocks=64)
    sequence = decode.submit(ids(400), ["p1"])
    for _ in range(num_turns):
        network.turn()

    network.kill("p1")
    network.finish()

    assert decode.results[sequence.handle].reason is wire.FinishReason.LENGTH
    assert sequence.num_remote < 384
    assert decode.counters.transfer_failures == 1


@pytest.mark.parametrize("num_turns", [1, 3, 5, 8])
def test_a_dying_receiver_leaves_nothing_at_the_sender(network: Network, num_turns: int) -> None:
    prefill = network.add("p1")
    decode = network.add("d1", num_receive_slots=1)
    decode.submit(ids(400), ["p1"])
    for _ in range(num_turns):
        network.turn()

    network.kill("d1")
    network.finish()

    prefill.assert_idle()


def test_the_next_hint_continues_where_the_first_died(network: Network) -> None:
    network.add("p1")
    second = network.add("p2")
    decode = network.add("d1", num_receive_slots=1)
    sequence = decode.submit(ids(400), ["p1", "p2"])
    network.run(lambda: sequence.num_remote >= 64)

    network.kill("p1")
    network.finish()

    assert sequence.num_remote == 384 + 0
    assert second.counters.transfers_out == 1
    assert second.counters.transfer_bytes_out < 25 * network.layout.block_bytes


def test_pairs_of_other_kv_are_refused(network: Network) -> None:
    network.add("p1", pair_hash="other")
    decode = network.add("d1")
    sequence = decode.submit(ids(100), ["p1"])

    network.finish()

    assert sequence.num_remote == 0
    assert not any(isinstance(message, wire.Prefill) for _, _, message in network.history)


def test_a_restarted_sender_is_met_again(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1")
    decode.submit(ids(100), ["p1"])
    network.settle()
    network.kill("p1")

    network.add("p2")
    sequence = decode.submit(ids(100, seed=3), ["p2"])
    network.finish()

    assert sequence.num_remote == 96


def test_a_broken_control_connection_ends_transfers_and_a_new_epoch_begins(network: Network) -> None:
    network.add("p1")
    decode = network.add("d1", num_receive_slots=1)
    first = decode.submit(ids(300), ["p1"])
    network.run(lambda: first.num_remote >= 32)

    network.disconnect("p1", "d1")
    second = decode.submit(ids(100, seed=4), ["p1"])
    network.finish()

    epochs = [message.epoch for _, _, message in network.history if isinstance(message, wire.Join)]
    assert epochs == [1, 2]
    assert second.num_remote == 96
    assert decode.results[first.handle].reason is wire.FinishReason.LENGTH


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.TOMBSTONE])
def test_a_damaged_payload_never_reaches_the_cache(network: Network, fault: Fault) -> None:
    prefill, decode = network.add("p1"), network.add("d1")
    prefill.faults[2] = fault
    sequence = decode.submit(ids(200), ["p1"])

    network.finish()

    assert 0 < sequence.num_remote < 192
    assert (decode.counters.corrupt_chunks, decode.counters.tombstones) == (
        (1, 0) if fault is Fault.CORRUPT else (0, 1)
    )
    after = decode.submit(ids(100, seed=8), ["p1"])
    network.finish()
    assert after.num_remote == 96
    assert [m.epoch for _, _, m in network.history if isinstance(m, wire.Join)] == [1]


def test_a_wedged_pair_is_closed_and_joined_again(wires: Wires) -> None:
    network = Network(wires, times=TransferTimes(stall_s=0.3))
    prefill, decode = network.add("p1"), network.add("d1")
    prefill.faults[1] = Fault.DROP
    sequence = decode.submit(ids(200), ["p1"])

    network.finish()

    assert 0 < sequence.num_remote < 192
    after = decode.submit(ids(100, seed=8), ["p1"])
    network.finish()
    assert after.num_remote == 96
    assert [m.epoch for _, _, m in network.history if isinstance(m, wire.Join)] == [1, 2]
    network.close()


def test_evicted_blocks_shorten_the_transfer(network: Network) -> None:
    prefill, decode = network.add("p1", num_blocks=16), network.add("d1", num_receive_slots=1)
    sequence = decode.submit(ids(200), ["p1"])
    network.run(lambda: sequence.num_remote >= 32)

    prefill.is_paused = True
    network.run(lambda: not network.queues and not network.dials)
    prefill.is_paused = False
    prefill.scheduler.drop_prefix_cache()
    network.finish()

    assert 32 <= sequence.num_remote < 192
    assert decode.results[sequence.handle].reason is wire.FinishReason.LENGTH
