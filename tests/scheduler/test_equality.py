"""The same tokens whatever the budget, the pool, the lookahead and what was preempted, shared or cached on the way."""

from __future__ import annotations

import random

import pytest

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.wire.messages import FinishReason, Sampling
from scheduler.oracle import Engine, expected_output, make_sequence


def prompts_with_shared_prefixes(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    base = [rng.randrange(23) for _ in range(longest)]
    prompts = []
    for _ in range(count):
        keep = rng.randrange(longest // 2)
        prompts.append(base[:keep] + [rng.randrange(23) for _ in range(rng.randrange(1, longest // 2))])
    return prompts


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("budget", [1, 7])
@pytest.mark.parametrize("num_blocks", [16, 200])
@pytest.mark.parametrize("caching", [True, False])
def test_output_does_not_depend_on_how_it_was_scheduled(
    lookahead: int, is_eager: bool, budget: int, num_blocks: int, caching: bool
) -> None:
    prompts = prompts_with_shared_prefixes(seed=budget + num_blocks, count=12, longest=24)
    sampling = Sampling(max_tokens=25, eos_token_ids=[3], stop_token_ids=[5], min_tokens=4)
    engine = Engine(
        num_blocks=num_blocks, budget=budget, lookahead=lookahead, is_eager=is_eager, enable_prefix_caching=caching
    )

    outputs = engine.run(*(make_sequence(i + 1, prompt, sampling=sampling, seed=i) for i, prompt in enumerate(prompts)))

    for i, prompt in enumerate(prompts):
        assert (outputs[i + 1], engine.finishes[i + 1]) == expected_output(prompt, sampling, seed=i)
    assert engine.pool.num_free == num_blocks


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("lookahead", [0, 1])
def test_long_outputs_in_a_tiny_pool_are_preempted_and_still_equal(policy: SchedulingPolicy, lookahead: int) -> None:
    sampling = Sampling(max_tokens=40)
    engine = Engine(num_blocks=14, lookahead=lookahead, policy=policy, is_eager=False)
    prompts = [[i, i + 1, i + 2] for i in range(6)]

    outputs = engine.run(
        *(make_sequence(i + 1, prompt, sampling=sampling, priority=i % 3) for i, prompt in enumerate(prompts))
    )

    assert engine.scheduler.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert outputs[i + 1] == expected_output(prompt, sampling)[0]


def test_a_sequence_that_outgrows_the_whole_cache_ends_at_capacity() -> None:
    engine = Engine(num_blocks=3, lookahead=1)

    outputs = engine.run(make_sequence(1, [1, 2], sampling=Sampling(max_tokens=50)))

    assert outputs[1] == expected_output([1, 2], Sampling(max_tokens=11))[0]
    assert engine.finishes[1].reason is FinishReason.LENGTH


def test_a_resumed_sequence_continues_where_it_stopped() -> None:
    sampling = Sampling(max_tokens=20)
    expected, finish = expected_output([4, 5, 6], sampling, seed=9)
    engine = Engine()

    outputs = engine.run(make_sequence(1, [4, 5, 6], emitted=expected[:7], sampling=sampling, seed=9))

    assert outputs[1] == expected
    assert engine.finishes[1] == finish
