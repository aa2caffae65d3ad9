"""Who goes first: arrival or priority; who waits for whom."""

from __future__ import annotations

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.request import Sequence, Status
from kvferry_engine.wire.messages import FinishReason, Sampling
from scheduler.oracle import Engine, expected_output, make_sequence


def order_of_start(engine: Engine, *sequences: Sequence) -> list[int]:
    engine.run(*sequences)
    seen: dict[int, None] = {}
    for plan in engine.plans:
        seen.update(dict.fromkeys(sequence.handle for sequence in plan.sequences))
    return list(seen)


def test_fcfs_ignores_priority() -> None:
    engine = Engine(max_num_seqs=1)

    order = order_of_start(engine, make_sequence(1, [1], priority=5), make_sequence(2, [2], priority=0))

    assert order == [1, 2]


def test_priority_serves_lower_numbers_first_and_equals_by_arrival() -> None:
    engine = Engine(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY)

    order = order_of_start(
        engine, make_sequence(1, [1], priority=2), make_sequence(2, [2], priority=1), make_sequence(3, [3], priority=1)
    )

    assert order == [2, 3, 1]


def test_siblings_wait_for_their_leader_and_share_its_prompt() -> None:
    engine = Engine(budget=5)
    prompt = list(range(10))
    leader = make_sequence(1, prompt, seed=1)
    followers = [make_sequence(i, prompt, seed=i, leader=leader) for i in (2, 3)]

    outputs = engine.run(leader, *followers)

    assert [sequence.num_cached for sequence in followers] == [8, 8]
    assert sum(int(plan.counts.sum()) for plan in engine.plans) == 10 + 2 * 2 + 3 * 7
    assert all(outputs[i] == expected_output(prompt, Sampling(max_tokens=8), seed=i)[0] for i in (1, 2, 3))


def test_siblings_go_alone_when_their_leader_is_aborted() -> None:
    engine = Engine(budget=4)
    leader = make_sequence(1, list(range(10)))
    follower = make_sequence(2, list(range(10)), leader=leader)
    engine.add(leader, follower)
    engine.turn()

    engine.note([update for update in [engine.scheduler.abort(1, "gone")] if update is not None])
    engine.run()

    assert engine.outputs[2] == expected_output(list(range(10)), Sampling(max_tokens=8))[0]


def test_siblings_do_not_wait_for_an_unknown_leader_that_is_aborted() -> None:
    engine = Engine()
    leader = make_sequence(1, list(range(10)))
    leader.status = Status.REMOTE
    engine.add(make_sequence(2, list(range(10)), leader=leader))
    assert not engine.scheduler.has_work

    assert engine.scheduler.abort(1, "gone") is None
    engine.run()

    assert engine.finishes[2].reason is FinishReason.LENGTH


def test_a_follower_can_be_aborted_while_it_waits() -> None:
    engine = Engine()
    leader = make_sequence(1, list(range(10)))
    engine.add(leader, make_sequence(2, list(range(10)), leader=leader))

    update = engine.scheduler.abort(2, "gone")
    engine.run()

    assert update is not None and update.finish is not None
    assert engine.scheduler.num_waiting == 0


def test_deadlines_end_waiting_and_running_sequences() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_sequence(1, [1], deadline_s=3.0), make_sequence(2, [2], deadline_s=2.0))

    engine.run()

    assert [engine.finishes[i].reason for i in (1, 2)] == [FinishReason.ABORT, FinishReason.ABORT]
    assert len(engine.outputs[1]) == 2
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_sequence_that_comes_too_late_ends_at_once() -> None:
    engine = Engine()
    engine.now = 5.0

    engine.add(make_sequence(1, [1], deadline_s=4.0))

    assert engine.finishes[1].message == "deadline exceeded"


def test_an_aborted_sequence_gets_no_more_news() -> None:
    engine = Engine(lookahead=1)
    engine.add(make_sequence(1, [1, 2, 3]))
    engine.turn()
    engine.turn()

    update = engine.scheduler.abort(1, "gone")
    engine.run()

    assert update is not None and update.finish is not None
    assert update.finish.reason is FinishReason.ABORT
    assert engine.scheduler.abort(1, "again") is None
    assert len(engine.outputs[1]) == 1
