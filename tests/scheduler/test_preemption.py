"""When blocks run out: the cheapest gives way, the first always gets on, nobody is thrashed."""

from __future__ import annotations

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.request import Sequence
from kvferry_engine.scheduler.preemption import choose_victim
from kvferry_engine.wire.messages import Sampling
from scheduler.oracle import Engine, expected_output, make_sequence

FCFS = SchedulingPolicy.FCFS


def running(handle: int, computed: int, *, priority: int = 0, preemptions: int = 0, progress: int = 0) -> Sequence:
    sequence = make_sequence(handle, [1], priority=priority)
    sequence.num_computed = computed
    sequence.num_preemptions = preemptions
    sequence.tokens_since_preemption = progress
    return sequence


def test_the_sequence_with_the_least_to_lose_gives_way() -> None:
    first, long, short = running(1, 50), running(2, 40), running(3, 9)

    assert choose_victim(long, [first, long, short], [], FCFS) is short


def test_among_equals_the_latest_gives_way() -> None:
    first, second, third = running(1, 9), running(2, 9), running(3, 9)

    assert choose_victim(first, [first, second, third], [], FCFS) is third


def test_nobody_displaces_the_first_one_or_more_work_than_its_own() -> None:
    first, long, short = running(1, 5), running(2, 40), running(3, 9)

    assert choose_victim(short, [first, long, short], [], FCFS) is None


def test_the_first_one_may_displace_anybody() -> None:
    first, long = running(1, 5), running(2, 40)

    assert choose_victim(first, [first, long], [], FCFS) is long


def test_the_least_important_gives_way_under_the_priority_policy() -> None:
    first, important, unimportant = running(1, 5, priority=0), running(2, 9, priority=0), running(3, 99, priority=1)
    order = [first, important, unimportant]

    assert choose_victim(important, order, [], SchedulingPolicy.PRIORITY) is unimportant
    assert choose_victim(unimportant, order, [], SchedulingPolicy.PRIORITY) is None


def test_a_preempted_sequence_is_spared_until_it_progressed() -> None:
    first, spared, other = running(1, 9), running(2, 3, preemptions=1), running(3, 7)
    progressed = running(4, 3, preemptions=1, progress=1)

    assert choose_victim(first, [first, spared, other], [], FCFS) is other
    assert choose_victim(first, [first, progressed, other], [], FCFS) is progressed


def test_a_spared_sequence_still_gives_way_when_it_is_the_only_one() -> None:
    first, spared = running(1, 9), running(2, 3, preemptions=1)

    assert choose_victim(first, [first, spared], [], FCFS) is spared


def test_a_waiting_holder_of_ferried_blocks_gives_way_too() -> None:
    first, second, holder = running(1, 90), running(2, 50), running(3, 8)

    assert choose_victim(first, [first, second], [holder], FCFS) is holder


def test_the_first_sequence_is_never_preempted() -> None:
    engine = Engine(num_blocks=8, enable_prefix_caching=False)
    first = make_sequence(1, [1, 2], sampling=Sampling(max_tokens=28))

    engine.run(first, *(make_sequence(i, [i], sampling=Sampling(max_tokens=20)) for i in (2, 3, 4)))

    assert engine.scheduler.num_preemptions > 0
    assert first.num_preemptions == 0


def test_a_preempted_sequence_starts_again_from_what_the_cache_kept() -> None:
    engine = Engine(num_blocks=8)
    first = make_sequence(1, [1, 2], sampling=Sampling(max_tokens=20))
    second = make_sequence(2, [3, 4], sampling=Sampling(max_tokens=20))

    outputs = engine.run(first, second)

    assert second.num_preemptions == 1
    assert outputs[2] == expected_output([3, 4], Sampling(max_tokens=20))[0]
    restart = next(p for p in engine.plans if second in p.sequences and p.generations[p.sequences.index(second)] == 1)
    assert restart.starts[restart.sequences.index(second)] > 0


def test_one_preemption_is_enough_when_its_blocks_are_still_fenced() -> None:
    engine = Engine(num_blocks=12, lookahead=1, enable_prefix_caching=False)
    sampling = Sampling(max_tokens=20)

    engine.run(*(make_sequence(i, [i, i], sampling=sampling) for i in (1, 2, 3)))

    assert engine.scheduler.num_preemptions == 1
    assert engine.finishes.keys() == {1, 2, 3}


def test_siblings_stop_waiting_for_a_preempted_leader() -> None:
    engine = Engine(num_blocks=6, budget=5)
    first = make_sequence(1, [1], sampling=Sampling(max_tokens=22))
    leader = make_sequence(2, list(range(12)))
    follower = make_sequence(3, list(range(12)), leader=leader)

    outputs = engine.run(first, leader, follower)

    assert outputs[2] == outputs[3] == expected_output(list(range(12)), Sampling(max_tokens=8))[0]
