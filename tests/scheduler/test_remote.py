"""KV that another engine ferries in: reserved, committed, kept when the transfer breaks, never touched by late writes."""

from __future__ import annotations

import pytest

from kvferry_engine.kv_cache.auditor import TransferClaim
from kvferry_engine.kv_cache.block_pool import Owner
from kvferry_engine.request import Sequence, Status
from kvferry_engine.wire.messages import FinishReason, Sampling
from scheduler.oracle import Engine, expected_output, make_sequence

PROMPT = list(range(18))


def remote(engine: Engine, handle: int = 1, prompt: list[int] = PROMPT) -> Sequence:
    sequence = make_sequence(handle, prompt)
    engine.scheduler.attach_prefix(sequence)
    return sequence


def ferry(engine: Engine, sequence: Sequence, num_blocks: int) -> None:
    for position in range(sequence.num_computed // 4, num_blocks):
        engine.runner.write_block(sequence.blocks[position], sequence, position)
    engine.scheduler.commit_remote(sequence, num_blocks)


def test_a_complete_fill_leaves_only_the_last_tokens_to_compute() -> None:
    engine = Engine()
    sequence = remote(engine)
    reserved = engine.scheduler.reserve_remote(sequence, 4)
    ferry(engine, sequence, 4)
    engine.scheduler.finish_remote(sequence, 0.0)

    engine.run()

    assert reserved is not None and len(reserved) == 4
    assert engine.plans[0].starts.tolist() == [16]
    assert sequence.num_remote == 16
    assert engine.outputs[1] == expected_output(PROMPT, Sampling(max_tokens=8))[0]


def test_a_remote_sequence_is_not_scheduled() -> None:
    engine = Engine()
    remote(engine)

    assert engine.scheduler.schedule(0.0) is None
    assert not engine.scheduler.has_work
    assert engine.scheduler.num_waiting == 1


def test_a_fill_starts_behind_the_local_prefix() -> None:
    engine = Engine()
    engine.run(make_sequence(7, PROMPT[:9]))
    sequence = make_sequence(1, PROMPT)

    attached = engine.scheduler.attach_prefix(sequence)
    reserved = engine.scheduler.reserve_remote(sequence, 4)

    assert attached == sequence.num_cached == 8
    assert reserved is not None and len(reserved) == 2
    engine.audit()


def test_a_broken_fill_keeps_what_was_committed() -> None:
    engine = Engine()
    sequence = remote(engine)
    engine.scheduler.reserve_remote(sequence, 4)
    ferry(engine, sequence, 2)

    engine.scheduler.finish_remote(sequence, 0.0)
    engine.audit()
    engine.run()

    assert engine.plans[0].starts.tolist() == [8]
    assert engine.outputs[1] == expected_output(PROMPT, Sampling(max_tokens=8))[0]


def test_committed_blocks_are_shared_at_once() -> None:
    engine = Engine()
    sequence = remote(engine)
    engine.scheduler.reserve_remote(sequence, 4)
    ferry(engine, sequence, 3)
    other = make_sequence(2, PROMPT)

    engine.run(other)

    assert other.num_cached == 12


def test_siblings_of_a_remote_leader_wait_for_its_blocks() -> None:
    engine = Engine()
    leader = remote(engine)
    follower = make_sequence(2, PROMPT, leader=leader)
    engine.add(follower)
    assert not engine.scheduler.has_work
    engine.scheduler.reserve_remote(leader, 4)

    ferry(engine, leader, 4)
    engine.run()

    assert follower.num_cached == 16
    assert leader.status is Status.REMOTE


def test_completed_fills_go_before_new_sequences() -> None:
    engine = Engine(max_num_seqs=1)
    late = remote(engine, handle=9)
    engine.scheduler.reserve_remote(late, 4)
    ferry(engine, late, 4)
    engine.add(make_sequence(1, [1, 2]))
    engine.scheduler.finish_remote(late, 0.0)

    plan = engine.turn()

    assert plan is not None and plan.sequences == [late]


def test_no_room_is_told_by_none_and_changes_nothing() -> None:
    engine = Engine(num_blocks=3)
    sequence = remote(engine, prompt=[1] * 12)
    engine.scheduler.attach_prefix(remote(engine, handle=2, prompt=[2] * 9))
    engine.scheduler.reserve_remote(engine.scheduler.sequences[2], 2)

    assert engine.scheduler.reserve_remote(sequence, 2) is None
    engine.audit()


def test_a_fill_does_not_overtake_an_older_sequence_that_waits_for_room() -> None:
    engine = Engine(num_blocks=6)
    holder = remote(engine, handle=1, prompt=[3] * 9)
    assert engine.scheduler.reserve_remote(holder, 2) is not None
    engine.add(make_sequence(2, list(range(20))))
    engine.turn()

    assert engine.scheduler.reserve_remote(remote(engine, handle=3, prompt=[4] * 9), 1) is None
    assert engine.scheduler.reserve_remote(remote(engine, handle=0, prompt=[4] * 9), 1) is not None


def test_an_abort_frees_everything_but_what_is_being_scattered() -> None:
    engine = Engine(claims=lambda: claims)
    claims: list[TransferClaim] = []
    sequence = remote(engine)
    reserved = engine.scheduler.reserve_remote(sequence, 4)
    assert reserved is not None
    engine.pool.take(reserved[:1], Owner.RECV_RESERVED, 1000)
    claims.append(TransferClaim(owner=Owner.RECV_RESERVED, owner_id=1000, blocks=reserved[:1]))

    engine.scheduler.abort(1, "gone")

    engine.audit()
    assert engine.pool.num_free == engine.pool.num_blocks - 1
    engine.pool.release(reserved[:1], 1000)
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("ending", ["abort", "deadline"])
def test_news_of_a_transfer_after_the_end_are_ignored(ending: str) -> None:
    engine = Engine()
    sequence = make_sequence(1, PROMPT, deadline_s=2.0)
    engine.scheduler.attach_prefix(sequence)
    engine.scheduler.reserve_remote(sequence, 4)
    if ending == "abort":
        engine.scheduler.abort(1, "gone")
    else:
        assert [u.finish.reason for u in engine.scheduler.expired(2.0) if u.finish] == [FinishReason.ABORT]

    engine.scheduler.commit_remote(sequence, 2)
    engine.scheduler.finish_remote(sequence, 3.0)

    assert engine.scheduler.reserve_remote(sequence, 4) is None
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.scheduler.has_work


def test_add_lets_a_remote_sequence_go_on_locally() -> None:
    engine = Engine()
    sequence = remote(engine)

    engine.run(sequence)

    assert engine.outputs[1] == expected_output(PROMPT, Sampling(max_tokens=8))[0]


def test_a_resumed_remote_sequence_that_is_complete_ends() -> None:
    engine = Engine()
    sequence = make_sequence(1, PROMPT, emitted=[1, 2], sampling=Sampling(max_tokens=2))
    engine.scheduler.attach_prefix(sequence)

    engine.scheduler.finish_remote(sequence, 0.0)

    assert engine.scheduler.has_work
    assert [u.finish for u in engine.scheduler.drain_updates()] == [sequence.finish]
    assert sequence.status is Status.FINISHED


def test_two_fills_that_fill_the_pool_do_not_block_each_other() -> None:
    engine = Engine(num_blocks=8)
    sequences = [remote(engine, handle=i, prompt=[i] * 17) for i in (1, 2)]
    for sequence in sequences:
        assert engine.scheduler.reserve_remote(sequence, 4) is not None
        ferry(engine, sequence, 4)
        engine.scheduler.finish_remote(sequence, 0.0)

    outputs = engine.run()

    for sequence in sequences:
        assert outputs[sequence.handle] == expected_output([sequence.handle] * 17, Sampling(max_tokens=8))[0]


def test_blocks_of_a_step_in_flight_are_not_given_to_a_fill() -> None:
    engine = Engine(num_blocks=3, lookahead=1, is_eager=False, enable_prefix_caching=False)
    engine.add(make_sequence(1, [1, 2, 3, 4, 5]))
    engine.turn()
    engine.scheduler.abort(1, "gone")
    sequence = remote(engine, handle=2, prompt=[7] * 10)

    while_in_flight = engine.scheduler.reserve_remote(sequence, 2)
    engine.turn()
    after_it_retired = engine.scheduler.reserve_remote(sequence, 2)
    ferry(engine, sequence, 2)
    engine.scheduler.finish_remote(sequence, 0.0)
    engine.run()

    assert while_in_flight is None
    assert after_it_retired is not None
    assert engine.outputs[2] == expected_output([7] * 10, Sampling(max_tokens=3))[0]
