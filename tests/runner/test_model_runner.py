"""The runner's results: sampled ids, prompt log-probs of any chunking, and errors that stay with their row."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from kit.checkpoints import make_checkpoint, reference_logits, reference_model
from kit.models import load_model, make_runner
from kit.steps import Blocks, generate, make_plan, make_sequence, retire
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.runner import executor
from kvferry_engine.scheduler.plan import PLACEHOLDER
from kvferry_engine.wire.packing import unpack_ids

PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, 320, 23)]


@functools.cache
def model() -> CausalLM:
    return load_model(make_checkpoint("llama"))


def test_rows_that_do_not_reach_the_end_sample_nothing() -> None:
    runner = make_runner(model())
    plan = make_plan(0, [(make_sequence(1, PROMPT, 4), 23), (make_sequence(2, PROMPT, 4), 22)], Blocks(64, 16))

    runner.launch(plan)
    result = runner.collect()

    assert result.token_ids[0] >= 0
    assert result.token_ids[1] == -1
    assert result.errors == {}


def test_a_step_in_which_nothing_is_sampled_has_a_result() -> None:
    runner = make_runner(model())

    runner.launch(make_plan(0, [(make_sequence(1, PROMPT, 4), 5)], Blocks(64, 16)))

    assert runner.collect().token_ids.tolist() == [-1]


@pytest.mark.parametrize("chunks", [[23], [1, 22], [7, 9, 6, 1]])
@pytest.mark.parametrize("piece", [4, 256])
def test_prompt_logprobs_equal_transformers(chunks: list[int], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "PROMPT_LOGITS_CHUNK", piece)
    runner, blocks = make_runner(model()), Blocks(64, 16)
    sequence, other = make_sequence(1, PROMPT, 4, prompt_logprobs=3), make_sequence(2, PROMPT[:5], 8)
    found = []
    for number, count in enumerate(chunks):
        work = [(sequence, count), (other, other.num_tokens - other.num_computed)]
        plan = make_plan(number, work, blocks)
        runner.launch(plan)
        result = runner.collect()
        found += result.prompt_logprobs.pop(plan.sequences.index(sequence), [])
        assert not result.prompt_logprobs
        retire(plan, result)

    expected = torch.log_softmax(reference_logits(reference_model(make_checkpoint("llama")), PROMPT), -1)

    assert len(found) == len(PROMPT) - 1
    for position, logprobs in enumerate(found):
        target = PROMPT[position + 1]
        row = expected[position]
        ids, ranks = unpack_ids(logprobs.ids), unpack_ids(logprobs.ranks)
        assert ids == [target, *row.topk(3).indices.tolist()]
        assert ranks == [int((row > row[target]).sum()) + 1, 1, 2, 3]
        np.testing.assert_allclose(logprobs.values, row[ids], atol=1e-4)


def test_nan_logits_fail_only_their_own_row() -> None:
    runner, blocks = make_runner(model()), Blocks(64, 16)
    good, bad = make_sequence(1, PROMPT, 4), make_sequence(2, PROMPT, 4)
    # The runner's cache is NaN where nothing was written: claiming a computed prefix reads that.
    bad.num_computed = 20
    plan = make_plan(0, [(good, 23), (bad, 3)], blocks)

    runner.launch(plan)
    result = runner.collect()

    assert list(result.errors) == [1]
    assert "NaN" in result.errors[1]
    assert result.token_ids[1] == -1
    assert result.token_ids[0] >= 0


def test_infinite_logits_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, blocks = make_runner(model()), Blocks(64, 16)
    executor = runner._executor
    sample_logits = executor.sample_logits

    def with_excluded_ids(*arguments: Any) -> Any:
        logits = sample_logits(*arguments)
        assert logits is not None
        logits[:, ::2] = float("-inf")
        logits[:, 7] = float("inf")
        return logits

    monkeypatch.setattr(executor, "sample_logits", with_excluded_ids)

    runner.launch(make_plan(0, [(make_sequence(1, PROMPT, 4), 23)], blocks))
    result = runner.collect()

    assert result.errors == {}
    assert result.token_ids[0] == 7


def test_a_step_may_be_launched_before_the_one_it_depends_on_is_collected() -> None:
    expected = [int(i) for i in generate(make_runner(model()), [make_sequence(1, PROMPT, 6)], blocks=Blocks(64, 16))[0]]
    runner, blocks = make_runner(model()), Blocks(64, 16)
    sequence, other = make_sequence(1, PROMPT, 6), make_sequence(2, PROMPT[:9], 6)
    runner.launch(make_plan(0, [(other, 9), (sequence, 23)], blocks))
    for number in range(1, 6):
        for each, computed in ((sequence, 23), (other, 9)):
            each.num_computed = computed + number - 1
            each.num_tokens = each.num_computed + 1
            each.tokens[each.num_computed] = PLACEHOLDER
        runner.launch(make_plan(number, [(sequence, 1), (other, 1)], blocks))
        first = runner.collect()
        assert first.token_ids[0 if number > 1 else 1] == expected[number - 1]

    assert runner.collect().token_ids[0] == expected[5]
