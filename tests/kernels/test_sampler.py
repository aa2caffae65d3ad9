import math

import pytest
import torch

from kvferry_engine.wire import rng
from kvferry_kernels import sampler
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.sampler import cpu, random_numbers, reference
from kvferry_kernels.testing import assert_close

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
POSITIONS = [0, 5, 2**31 + 7, 17, 1, 99]


def test_constants_are_those_of_the_wire() -> None:
    for name in ("K1", "K2", "MIX_A", "MIX_B", "UNIFORM_SHIFT", "UNIFORM_SCALE"):
        assert getattr(random_numbers, name) == getattr(rng, name)


def test_uniform_numbers_are_those_of_the_wire() -> None:
    ids = torch.tensor([0, 1, 49151, 2**17, 255999])
    keys = reference.row_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS))

    uniforms = reference.uniform(keys[:, None], ids).double()

    expected = [[rng.uniform(s, p, i) for i in ids.tolist()] for s, p in zip(SEEDS, POSITIONS, strict=True)]
    assert uniforms.tolist() == expected


def test_the_gumbel_bound_holds_for_the_largest_uniform_number() -> None:
    largest = (2**23 - 1 + 0.5) * 2.0**-23

    assert -math.log(-math.log(largest)) < cpu.GUMBEL_BOUND
    assert torch.tensor(largest, dtype=torch.float32).item() < 1


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 1000, 5001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_draws_are_those_of_the_wire(backend: Backend, device: str, vocab_size: int, spread: float) -> None:
    logits = torch.randn(len(SEEDS), vocab_size) * spread
    expected = [
        max(range(vocab_size), key=lambda i: row[i] - math.log(-math.log(rng.uniform(seed, position, i))))
        for row, seed, position in zip(logits.tolist(), SEEDS, POSITIONS, strict=True)
    ]

    ids = sampler.gumbel_argmax(
        logits.to(device), torch.tensor(SEEDS, device=device), torch.tensor(POSITIONS, device=device), backend=backend
    )

    assert ids.tolist() == expected


def test_excluded_ids_are_never_drawn(backend: Backend, device: str) -> None:
    logits = torch.full((4, 700), float("-inf"))
    logits[:, 611] = -50.0
    seeds = torch.arange(4)

    ids = sampler.gumbel_argmax(logits.to(device), seeds.to(device), seeds.to(device), backend=backend)

    assert ids.tolist() == [611] * 4


def test_draws_follow_the_distribution(backend: Backend, device: str) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_draws = 2000
    logits = probabilities.log().repeat(num_draws, 1)
    seeds, positions = torch.full((num_draws,), 42), torch.arange(num_draws)
    if backend is Backend.TRITON and device == "cpu":
        logits, seeds, positions = logits[:50], seeds[:50], positions[:50]

    ids = sampler.gumbel_argmax(logits.to(device), seeds.to(device), positions.to(device), backend=backend).cpu()

    shares = ids.bincount(minlength=4) / len(ids)
    assert (shares - probabilities).abs().max() < 2.5 / math.sqrt(len(ids))


@pytest.mark.parametrize("vocab_size", [1, 64, 200, 4097])
def test_greedy_takes_the_lowest_of_equal_ids(backend: Backend, device: str, vocab_size: int) -> None:
    logits = torch.randint(0, 4, (5, vocab_size)).float()

    ids = sampler.greedy(logits.to(device), backend=backend).tolist()

    assert ids == [row.index(max(row)) for row in logits.tolist()]


def test_equal_scores_go_to_the_lowest_id(backend: Backend, device: str) -> None:
    logits = torch.full((1, 300), float("-inf"))

    ids = sampler.gumbel_argmax(
        logits.to(device), torch.tensor([1], device=device), torch.tensor([1], device=device), backend=backend
    )

    assert ids.tolist() == [0]


def test_penalties_match_the_reference(backend: Backend, device: str) -> None:
    logits = torch.randn(3, 1100)
    arguments = (
        torch.rand(3, 1100) < 0.2,
        torch.randint(0, 4, (3, 1100), dtype=torch.int32),
        torch.tensor([0.0, 0.7, -1.0]),
        torch.tensor([0.0, 0.3, 2.0]),
        torch.tensor([1.0, 1.3, 0.5]),
    )
    expected = logits.clone()
    sampler.apply_penalties(expected, *arguments, backend=Backend.REFERENCE)

    actual = logits.to(device)
    sampler.apply_penalties(actual, *(argument.to(device) for argument in arguments), backend=backend)

    assert_close(actual.cpu(), expected)
    assert torch.equal(actual.cpu()[0], logits[0])


def test_penalties_of_one_id_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    prompt, counts = torch.tensor([[True, False, False]]), torch.tensor([[0, 3, 0]], dtype=torch.int32)

    sampler.apply_penalties(logits, prompt, counts, torch.tensor([0.5]), torch.tensor([0.1]), torch.tensor([2.0]))

    assert_close(logits, torch.tensor([[1.0, -4.0 - 0.3 - 0.5, 1.0]]))


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (50, 6.0), (1000, 0.3), (1000, 2.0)])
def test_truncation_matches_the_reference(backend: Backend, device: str, vocab_size: int, spread: float) -> None:
    settings = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (-1, 0.9, 0.0),
        (0, 0.1, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.1),
        (30, 0.8, 0.01),
        (5000, 0.5, 0.0),
        (3, 0.9999, 0.5),
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(settings), vocab_size, generator=generator) * spread
    logits[::2, vocab_size // 2 + 1 :] = float("-inf")
    top_k, top_p, min_p = zip(*settings, strict=True)
    arguments = (torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))
    expected = logits.clone()
    sampler.top_k_top_p_min_p(expected, *arguments, backend=Backend.REFERENCE)

    actual = logits.to(device)
    sampler.top_k_top_p_min_p(actual, *(argument.to(device) for argument in arguments), backend=backend)

    assert torch.equal(actual.cpu(), expected)


def test_ties_with_the_kth_id_stay(backend: Backend, device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]], device=device)
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)

    sampler.top_k_top_p_min_p(logits, torch.tensor([2], dtype=torch.int32, device=device), one, zero, backend=backend)

    assert (logits > float("-inf")).tolist() == [[False, True, True, True, True, False]]


def test_rows_with_different_settings_do_not_disturb_each_other(backend: Backend, device: str) -> None:
    logits = torch.randn(4, 600)
    arguments = (
        torch.tensor([0, 7, 0, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.7, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.3]),
    )
    expected = logits.clone()
    sampler.top_k_top_p_min_p(expected, *arguments, backend=Backend.REFERENCE)

    actual = logits.to(device)
    sampler.top_k_top_p_min_p(actual, *(argument.to(device) for argument in arguments), backend=backend)

    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(actual.cpu()[0], logits[0])


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_large_vocabularies_are_truncated_without_a_sort(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    logits = torch.randn(2, 49152) * spread
    sizes: list[int] = []
    sort = torch.Tensor.sort

    def counted_sort(values: torch.Tensor, **options: bool) -> torch.return_types.sort:
        sizes.append(values.numel())
        return sort(values, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted_sort)

    kept = logits.clone()
    sampler.top_k_top_p_min_p(kept, torch.zeros(2, dtype=torch.int32), torch.full((2,), 0.95), torch.zeros(2))

    mass = torch.where(kept > float("-inf"), logits.double().softmax(-1), 0.0).sum(-1)
    assert (mass >= 0.95 - 1e-6).all()
    smallest = kept.masked_fill(kept == float("-inf"), float("inf")).amin(-1, keepdim=True)
    strictly_above = torch.where(logits > smallest, logits.double().softmax(-1), 0.0).sum(-1)
    assert (strictly_above <= 0.95 + 1e-6).all()
    assert spread == 0.0 or max(sizes, default=0) <= cpu.NUCLEUS_HEAD


def test_an_empty_batch(backend: Backend, device: str) -> None:
    logits, ids = torch.empty(0, 10, device=device), torch.empty(0, dtype=torch.int64, device=device)

    assert sampler.gumbel_argmax(logits, ids, ids, backend=backend).shape == (0,)
    assert sampler.greedy(logits, backend=backend).shape == (0,)
