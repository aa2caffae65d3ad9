"""One token budget for everything: decodes first, then prompts in chunks, then new sequences."""

from __future__ import annotations

import pytest

from kvferry_engine.errors import RequestError
from kvferry_engine.wire.messages import Sampling
from scheduler.oracle import Engine, make_sequence


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(budget=7)

    engine.run(make_sequence(1, list(range(18)), sampling=Sampling(max_tokens=1)))

    assert [plan.counts.tolist() for plan in engine.plans] == [[7], [7], [4]]
    assert [plan.samples.tolist() for plan in engine.plans] == [[False], [False], [True]]


def test_decodes_come_before_a_running_prompt_and_that_before_new_sequences() -> None:
    engine = Engine(budget=6)
    engine.add(make_sequence(1, [1, 2], sampling=Sampling(max_tokens=9)))
    engine.turn()
    engine.add(make_sequence(2, list(range(8))), make_sequence(3, [4]))

    plans = [engine.turn(), engine.turn()]

    rows = [[(s.handle, int(c)) for s, c in zip(p.sequences, p.counts, strict=True)] for p in plans if p is not None]
    assert rows == [[(1, 1), (2, 5)], [(1, 1), (2, 3), (3, 1)]]


def test_no_step_has_more_rows_than_max_num_seqs() -> None:
    engine = Engine(max_num_seqs=2)

    engine.run(*(make_sequence(i, [i]) for i in range(1, 6)))

    assert max(len(plan.sequences) for plan in engine.plans) == 2


def test_a_budget_smaller_than_the_number_of_decodes_serves_the_first_ones() -> None:
    engine = Engine(budget=2)
    engine.add(*(make_sequence(i, [i]) for i in (1, 2, 3)))
    engine.turn()

    plan = engine.turn()

    assert plan is not None
    assert [sequence.handle for sequence in plan.sequences] == [1, 2]


def test_admission_reserves_the_prompt_and_one_more_token() -> None:
    engine = Engine(budget=2)
    sequence = make_sequence(1, list(range(8)))
    engine.add(sequence)

    engine.turn()

    assert len(sequence.blocks) == 3


def test_a_prompt_that_leaves_no_room_for_growth_waits() -> None:
    engine = Engine(num_blocks=5, enable_prefix_caching=False)
    engine.add(make_sequence(1, list(range(7))), make_sequence(2, list(range(11))))

    plan = engine.turn()

    assert plan is not None
    assert [sequence.handle for sequence in plan.sequences] == [1]
    assert engine.scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("prompt_length", "upto", "max_model_len"), [(0, 0, 64), (64, 0, 64), (17, 0, 64), (17, 18, 64), (20, 17, 64)]
)
def test_what_can_never_run_is_refused(prompt_length: int, upto: int, max_model_len: int) -> None:
    engine = Engine(num_blocks=4, max_model_len=max_model_len)

    with pytest.raises(RequestError):
        engine.add(make_sequence(1, [1] * prompt_length, upto=upto))

    assert not engine.scheduler.sequences


def test_waiting_tokens_are_those_no_cache_holds() -> None:
    engine = Engine(budget=4)
    engine.run(make_sequence(1, list(range(9)), sampling=Sampling(max_tokens=1)))
    engine.add(make_sequence(2, list(range(11)), sampling=Sampling(max_tokens=1)))
    queued = engine.scheduler.waiting_tokens
    engine.add(make_sequence(3, [20, 21, 22, 20, 21, 22], sampling=Sampling(max_tokens=1)))

    engine.turn()

    assert queued == 3
    assert engine.scheduler.waiting_tokens == 5
