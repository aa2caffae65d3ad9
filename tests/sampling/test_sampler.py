"""The vectorised sampler equals the row-by-row rules, whatever is mixed in a batch, and however a sequence got here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_engine.config import LogprobsMode
from kvferry_engine.request import Sequence
from kvferry_engine.sampling.sampler import Sampler
from kvferry_engine.wire.messages import Sampling
from kvferry_engine.wire.rng import uniform
from sampling.naive import append, entries, make_sequence, naive_sample

VOCAB = 23
CPU = torch.device("cpu")


def make_sampler(mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, mode, CPU)


def random_logits(count: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def assert_equals_naive(
    sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence], mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
) -> list[int]:
    """Sample once and compare ids and figures with the naive rules; return the ids."""
    expected = [naive_sample(row, sequence, mode) for row, sequence in zip(logits, sequences, strict=True)]

    ids, figures = sampler.sample(logits.clone(), sequences)

    assert ids.dtype == torch.int64
    assert ids.tolist() == [token for token, _ in expected]
    for row, (_, shown) in enumerate(expected):
        assert (row in figures) == (shown is not None)
        if shown is not None:
            got = entries(figures[row])
            assert [(i, rank) for i, _, rank in got] == [(i, rank) for i, _, rank in shown]
            np.testing.assert_allclose([v for _, v, _ in got], [v for _, v, _ in shown], rtol=1e-5, atol=1e-5)
    return ids.tolist()


ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(50),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    temperature=st.sampled_from([0.0, 1e-6, 0.005, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.903, 0.517, 0.011]),
    top_k=st.sampled_from([0, 0, 1, 4, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.41]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    eos_token_ids=st.sampled_from([[], [0], [0, 3]]),
    stop_token_ids=st.lists(ids, max_size=2),
    logit_bias=st.none() | st.dictionaries(ids, st.sampled_from([-200.0, -3.0, 2.0, 500.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, min_size=4, max_size=9, unique=True),
    bad_words=st.none() | st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
    logprobs=st.sampled_from([None, None, 0, 1, 5, -1]),
    logprob_token_ids=st.none() | st.none() | st.lists(ids, min_size=1, max_size=3),
)
sequences_of_a_batch = st.lists(
    st.tuples(
        samplings,
        st.lists(ids, min_size=1, max_size=6),
        st.lists(ids, max_size=6),
        st.integers(-(2**63), 2**63 - 1),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=120, deadline=None)
@given(batch=sequences_of_a_batch, mode=st.sampled_from(list(LogprobsMode)), seed=st.integers(0, 10**6))
def test_any_mixture_of_parameters_equals_the_naive_rules(batch: list[Any], mode: LogprobsMode, seed: int) -> None:
    sequences = [
        make_sequence(prompt, output, sampling, seed=row_seed, handle=handle)
        for handle, (sampling, prompt, output, row_seed) in enumerate(batch)
    ]
    sampler = make_sampler(mode)

    for step in range(3):
        tokens = assert_equals_naive(sampler, random_logits(len(sequences), seed + step), sequences, mode)
        for sequence, token in zip(sequences, tokens, strict=True):
            append(sequence, token)


@settings(max_examples=40, deadline=None)
@given(batch=sequences_of_a_batch, seed=st.integers(0, 10**6), data=st.data())
def test_changing_batches_preemption_and_forgetting_change_nothing(
    batch: list[Any], seed: int, data: st.DataObject
) -> None:
    sequences = [
        make_sequence(prompt, output, sampling, seed=row_seed, handle=handle)
        for handle, (sampling, prompt, output, row_seed) in enumerate(batch)
    ]
    sampler = make_sampler()

    for step in range(5):
        chosen = data.draw(st.lists(st.sampled_from(sequences), min_size=1, unique_by=id))
        if data.draw(st.booleans()):
            chosen[0].generation += 1
        if data.draw(st.booleans()):
            sampler.forget([chosen[-1].handle, 99])
        tokens = assert_equals_naive(sampler, random_logits(len(chosen), seed + step), chosen)
        for sequence, token in zip(chosen, tokens, strict=True):
            append(sequence, token)


@pytest.mark.parametrize("is_penalised", [False, True])
def test_a_draw_depends_on_seed_and_position_not_on_the_batch(is_penalised: bool) -> None:
    extras = {"repetition_penalty": 1.2, "bad_words": [[1, 2], [3]]} if is_penalised else {}
    sampling = Sampling(max_tokens=50, temperature=0.9, top_p=0.93, **extras)
    logits = random_logits(20, vocab_size=500)

    alone: list[int] = []
    first = make_sequence([5, 6, 7], [], sampling, seed=42)
    sampler = make_sampler(vocab_size=500)
    for row in logits:
        token = int(sampler.sample(row[None].clone(), [first])[0])
        alone.append(token)
        append(first, token)

    for cut in (1, 7, 19):
        resumed = make_sequence([5, 6, 7], alone[:cut], sampling, seed=42, handle=7)
        others = [make_sequence([i], [i], Sampling(max_tokens=9, top_k=i), seed=i, handle=50 + i) for i in range(3)]
        batch = torch.cat((random_logits(3, seed=9, vocab_size=500), logits[cut : cut + 1]))
        ids, _ = make_sampler(vocab_size=500).sample(batch, [*others, resumed])
        assert int(ids[3]) == alone[cut]


def test_steps_launched_ahead_draw_the_same_tokens() -> None:
    """Lookahead 1: a step is sampled before the sequence learns the token of the step before."""
    sampling = Sampling(
        max_tokens=50,
        temperature=0.9,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        bad_words=[[4, 5, 6], [7, 8], [9]],
    )
    plain = Sampling(max_tokens=50, temperature=0.7)
    logits = random_logits(40).view(20, 2, VOCAB)

    def run(lookahead: int) -> list[list[int]]:
        sequences = [make_sequence([1, 2], [4, 5], s, seed=3, handle=h) for h, s in enumerate((sampling, plain))]
        sampler, pending, said = make_sampler(), [], []
        for step in range(20):
            positions = [4 + step] * 2
            ids, _ = sampler.sample(logits[step].clone(), sequences, positions)
            pending.append(ids.tolist())
            said.append(ids.tolist())
            for sequence in sequences:
                sequence.num_placeholders += 1
            if len(pending) > lookahead:
                for sequence, token in zip(sequences, pending.pop(0), strict=True):
                    sequence.num_placeholders -= 1
                    append(sequence, token)
        return said

    assert run(1) == run(0)


def test_draws_are_those_of_the_wires_random_numbers() -> None:
    logits = torch.zeros(1, 1000)
    sequence = make_sequence([1, 2, 3], [4], Sampling(max_tokens=9), seed=-17)

    ids, _ = make_sampler(vocab_size=1000).sample(logits, [sequence])

    numbers = [uniform(-17, 4, i) for i in range(1000)]
    assert int(ids[0]) == numbers.index(max(numbers))


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [5, 9]] = 1.0
    greedy = make_sequence([1], [], Sampling(max_tokens=9, temperature=0.0, logprobs=2))

    ids, figures = make_sampler().sample(logits, [greedy, greedy])

    assert ids.tolist() == [5, 5]
    assert [(i, rank) for i, _, rank in entries(figures[0])] == [(5, 1), (9, 2)]


def test_temperatures_near_zero_are_raised_or_greedy() -> None:
    logits = random_logits(200)
    lowest = [make_sequence([1], [], Sampling(max_tokens=9, temperature=0.01), seed=s, handle=s) for s in range(200)]
    raised = [make_sequence([1], [], Sampling(max_tokens=9, temperature=1e-4), seed=s, handle=s) for s in range(200)]
    greedy = [make_sequence([1], [], Sampling(max_tokens=9, temperature=9e-6), seed=s, handle=s) for s in range(200)]
    close = logits * 0.003

    assert make_sampler().sample(close.clone(), raised)[0].equal(make_sampler().sample(close.clone(), lowest)[0])
    assert not make_sampler().sample(close.clone(), raised)[0].equal(close.argmax(-1))
    assert make_sampler().sample(close.clone(), greedy)[0].equal(close.argmax(-1))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    keep = expected > 0
    assert (counts[~keep] == 0).all()
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.9, "temperature": 1.7},
    ],
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=9, **values)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    num_draws = 4000
    sequences = [make_sequence([1], [], sampling, seed=seed, handle=seed) for seed in range(num_draws)]

    ids, figures = make_sampler(LogprobsMode.PROCESSED_LOGPROBS, 12).sample(
        logits.repeat(num_draws + 1, 1),
        [*sequences, make_sequence([1], [], Sampling(max_tokens=9, logprobs=-1, **values), handle=-1)],
    )
    shown = entries(figures[num_draws])
    probabilities = np.zeros(12)
    for token_id, value, _ in shown:
        probabilities[token_id] = np.exp(value)
    counts = np.bincount(ids[:num_draws].numpy(), minlength=12)

    # 99.9 % quantile of chi-square with 11 degrees of freedom; seeds are fixed, so this never flickers.
    assert chi_square(counts, probabilities) < 31.3
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)


def test_successive_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(6))
    sequence = make_sequence([1], [], Sampling(max_tokens=9), seed=77)
    num_draws = 4000

    ids, _ = make_sampler(vocab_size=12).sample(
        logits.repeat(num_draws, 1), [sequence] * num_draws, list(range(1, num_draws + 1))
    )

    counts = np.bincount(ids.numpy(), minlength=12)
    assert chi_square(counts, torch.softmax(logits.double(), -1).numpy()) < 31.3


def test_min_tokens_hides_end_ids_until_enough_is_said() -> None:
    sampling = Sampling(max_tokens=9, min_tokens=2, temperature=0.0, eos_token_ids=[3], stop_token_ids=[4])
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 8]] = torch.tensor([9.0, 8.0, 1.0])
    sequence = make_sequence([1], [], sampling)
    sampler = make_sampler()

    said = []
    for _ in range(3):
        token = int(sampler.sample(logits.clone(), [sequence])[0])
        said.append(token)
        append(sequence, token)

    assert said == [8, 8, 3]


def test_counts_are_kept_from_step_to_step_and_given_up_at_the_end() -> None:
    sampler = make_sampler()
    sequences = [
        make_sequence([1], [], Sampling(max_tokens=9, presence_penalty=1.0), handle=handle) for handle in range(20)
    ]
    sampler.sample(random_logits(20), sequences)
    assert len(sampler._counts) == 20

    sampler.forget(list(range(20)))
    sampler.sample(random_logits(1), [make_sequence([1], [], Sampling(max_tokens=9, presence_penalty=1.0), handle=5)])

    assert len(sampler._counts) == 1


def test_a_handle_used_again_starts_with_new_counts() -> None:
    sampling = Sampling(max_tokens=9, temperature=0.0, frequency_penalty=2.0)
    sampler = make_sampler()
    sampler.sample(random_logits(1), [make_sequence([1, 2], [3], sampling, handle=1)])

    assert_equals_naive(sampler, random_logits(1, 1), [make_sequence([1, 2], [4, 4], sampling, handle=1)])


def test_greedy_rows_without_extras_take_the_plain_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("not needed for greedy rows")

    for name in ("gumbel_argmax", "top_k_top_p_min_p", "apply_penalties", "token_logprobs"):
        monkeypatch.setattr(f"kvferry_engine.sampling.sampler.{name}", never)
    logits = random_logits(3)
    sequences = [make_sequence([1], [], Sampling(max_tokens=9, temperature=0.0), handle=h) for h in range(3)]

    ids, figures = make_sampler().sample(logits, sequences)

    assert ids.equal(logits.argmax(-1))
    assert figures == {}
