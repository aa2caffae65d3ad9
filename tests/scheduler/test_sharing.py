"""Equal prefixes are computed once and shared by reference, within their namespace and only when complete."""

from __future__ import annotations

import numpy as np

from kvferry_engine.scheduler.plan import StepResult
from kvferry_engine.wire.hashing import namespace_root
from kvferry_engine.wire.messages import FinishReason, Sampling, TokenLogprobs
from scheduler.oracle import Engine, expected_output, make_sequence

ONE = Sampling(max_tokens=1)


def test_a_later_sequence_finds_the_full_blocks_of_an_earlier_one() -> None:
    engine = Engine()
    engine.run(make_sequence(1, list(range(10)), sampling=ONE))
    second = make_sequence(2, list(range(11)), sampling=ONE)

    engine.run(second)

    assert second.num_cached == 8
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (21, 8)


def test_blocks_are_shared_while_their_first_sequence_still_runs() -> None:
    engine = Engine(budget=64)
    first, second = make_sequence(1, list(range(10))), make_sequence(2, list(range(10)))
    engine.add(first)
    engine.turn()
    engine.add(second)

    engine.turn()

    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]


def test_at_least_one_token_is_computed() -> None:
    engine = Engine()
    engine.run(make_sequence(1, list(range(8)), sampling=ONE))
    second = make_sequence(2, list(range(8)), sampling=ONE)

    engine.run(second)

    assert second.num_cached == 4


def test_output_blocks_are_cached_too() -> None:
    engine = Engine()
    output = engine.run(make_sequence(1, [1, 2, 3], sampling=Sampling(max_tokens=10)))[1]
    second = make_sequence(2, [1, 2, 3, *output], sampling=ONE)

    engine.run(second)

    assert second.num_cached == 12


def test_two_sequences_computing_the_same_block_at_once_keep_their_own_copies() -> None:
    engine = Engine(budget=64)
    first, second = make_sequence(1, list(range(9))), make_sequence(2, list(range(9)))
    engine.add(first, second)

    engine.turn()

    assert not set(first.blocks) & set(second.blocks)
    assert len(engine.index) == 2


def test_namespaces_do_not_mix() -> None:
    engine = Engine()
    engine.run(make_sequence(1, list(range(10)), root=namespace_root(cache_salt="a")))
    second = make_sequence(2, list(range(10)), root=namespace_root(cache_salt="b"))

    engine.run(second)

    assert second.num_cached == 0


def test_without_prefix_caching_nothing_is_shared_or_indexed() -> None:
    engine = Engine(enable_prefix_caching=False)
    engine.run(make_sequence(1, list(range(10))))
    second = make_sequence(2, list(range(10)))

    engine.run(second)

    assert second.num_cached == 0
    assert len(engine.index) == 0
    assert engine.scheduler.prefix_queries == 0


def test_prompt_logprobs_need_the_whole_prompt_and_are_told_once() -> None:
    engine = Engine(budget=4)
    engine.run(make_sequence(1, list(range(10))))
    sampling = Sampling(max_tokens=2, prompt_logprobs=0)
    sequence = make_sequence(2, list(range(10)), sampling=sampling)
    engine.add(sequence)
    told: list[TokenLogprobs] = []
    entries = [TokenLogprobs(ids=b"", values=[float(i)], ranks=b"") for i in range(10)]

    for turn in range(8):
        plan = engine.scheduler.schedule(0.0)
        if plan is None:
            break
        start, stop = int(plan.starts[0]) + 1, min(int(plan.starts[0] + plan.counts[0]) + 1, 10)
        result = StepResult(token_ids=np.asarray([3]), prompt_logprobs={0: entries[start:stop]})
        for update in engine.scheduler.retire(plan, result, 0.0):
            told.extend(update.prompt_logprobs or [])
        if turn == 1:
            engine.scheduler._preempt(sequence)

    assert sequence.num_cached == 0
    assert [entry.values[0] for entry in told] == [float(i) for i in range(1, 10)]


def test_a_dropped_cache_is_neither_read_nor_extended_by_old_blocks() -> None:
    engine = Engine()
    old = make_sequence(1, list(range(10)))
    engine.add(old)
    engine.turn()

    engine.scheduler.drop_prefix_cache()
    engine.run()
    assert len(engine.index) == 0
    new = make_sequence(2, list(range(10)))
    engine.run(new)

    assert new.num_cached == 0
    assert engine.outputs[1] == engine.outputs[2] == expected_output(list(range(10)), Sampling(max_tokens=8))[0]


def test_a_prefill_sequence_reports_progress_and_leaves_its_blocks_in_the_cache() -> None:
    engine = Engine(budget=8)
    sequence = make_sequence(1, list(range(13)), upto=12)
    engine.add(sequence)
    progress = []

    while not engine.is_idle:
        engine.turn()
        progress.append(engine.computed[1])

    assert progress == [8, 12]
    assert engine.finishes[1].reason is FinishReason.STOP
    assert len(engine.index.lookup(sequence.hashes)) == 3
    assert not any(plan.samples.any() for plan in engine.plans)


def test_a_prefill_sequence_that_is_cached_already_needs_no_step() -> None:
    engine = Engine()
    engine.run(make_sequence(1, list(range(13)), upto=12))
    num_plans = len(engine.plans)
    second = make_sequence(2, list(range(13)), upto=12)

    engine.run(second)

    assert len(engine.plans) == num_plans
    assert (engine.finishes[2].reason, engine.computed[2], second.num_cached) == (FinishReason.STOP, 12, 12)


def test_prefill_blocks_are_found_by_hash_even_without_prefix_caching() -> None:
    engine = Engine(enable_prefix_caching=False)
    sequence = make_sequence(1, list(range(9)), upto=8)

    engine.run(sequence)

    assert len(engine.index.lookup(sequence.hashes)) == 2


def test_a_starting_prefill_sequence_is_announced_with_what_the_cache_has() -> None:
    engine = Engine()
    engine.run(make_sequence(1, list(range(9)), upto=8))
    engine.add(make_sequence(2, list(range(13)), upto=12))

    engine.scheduler.schedule(0.0)
    updates = engine.scheduler.drain_updates()

    assert [(u.sequence.handle, u.num_computed, u.finish) for u in updates] == [(2, 8, None)]
