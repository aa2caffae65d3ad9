"""Figures at a position: order, ranks, ties, depth and modes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_engine.config import LogprobsMode
from kvferry_engine.sampling.logprobs import order_keys, token_logprobs
from sampling.naive import entries, naive_figures


def test_the_target_is_first_and_takes_a_place_among_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])

    outside = entries(token_logprobs(logits, [0], 2)[0])
    inside = entries(token_logprobs(logits, [2], 2)[0])

    assert [(i, rank) for i, _, rank in outside] == [(0, 4), (1, 1), (2, 2)]
    assert [(i, rank) for i, _, rank in inside] == [(2, 2), (1, 1)]


def test_values_are_log_softmax_or_logits() -> None:
    logits = torch.randn(3, 50)
    expected = torch.log_softmax(logits, -1)

    for mode, numbers in ((LogprobsMode.RAW_LOGPROBS, expected), (LogprobsMode.RAW_LOGITS, logits)):
        for row, figures in enumerate(token_logprobs(logits, torch.tensor([4, 5, 6]), -1, mode=mode)):
            got = entries(figures)
            assert len(got) == 50
            for token_id, value, _ in got:
                assert value == pytest.approx(float(numbers[row, token_id]), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, float("-inf")]), min_size=9, max_size=9),
        min_size=1,
        max_size=40,
    ),
    count=st.integers(-1, 12),
    further=st.lists(st.integers(0, 8), max_size=4),
    target=st.integers(0, 8),
)
def test_equal_logits_are_ordered_by_id(values: list[list[float]], count: int, further: list[int], target: int) -> None:
    logits = torch.tensor(values)
    logits[:, 0] = 0.25

    result = token_logprobs(logits, [target] * len(values), [count] * len(values), further_ids=[further] * len(values))

    for row, figures in zip(logits, result, strict=True):
        expected = naive_figures(row, target, count, further, LogprobsMode.RAW_LOGPROBS)
        assert [(i, rank) for i, _, rank in entries(figures)] == [(i, rank) for i, _, rank in expected]


def test_depths_and_further_ids_may_differ_between_positions() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(3, 1)

    result = token_logprobs(logits, [1, 1, 1], [0, 2, 1], further_ids=[[3, 0], [], [1]])

    assert [[i for i, _, _ in entries(figures)] for figures in result] == [[1, 3, 0], [1, 2], [1]]
    assert [[rank for _, _, rank in entries(figures)] for figures in result] == [[1, 3, 4], [1, 2], [1]]


def test_logits_are_not_changed_and_no_positions_give_nothing() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()

    token_logprobs(logits, [1, 2], 3)

    assert logits.equal(before)
    assert token_logprobs(logits[:0], [], 3) == []


def test_keys_order_like_floats() -> None:
    values = torch.tensor([[float("-inf"), -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, float("inf")]])

    assert (order_keys(values).diff() > 0).all()
