"""Every op with a C++ path on CPUs, with the extension and without it, against the reference."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvferry_engine.wire import rng
from kvferry_kernels import extension, sampler
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.paged_attention import decode_attention
from kvferry_kernels.rms_norm import rms_norm
from kvferry_kernels.rope_kv import rope_and_write
from kvferry_kernels.silu_mul import silu_mul
from kvferry_kernels.testing import PagedCase, assert_close, poisoned, random_tensor
from kvferry_kernels.varlen_attention import prefill_attention

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["extension", "torch"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ops use the extension; skips where it was not built."""
    is_compiled: bool = request.param == "extension"
    if is_compiled and not extension.is_available():
        pytest.skip("the C++ extension was not built")
    monkeypatch.setattr(extension, "is_available", lambda: is_compiled)
    return is_compiled


def decoded(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    case = PagedCase(lengths=[1, 0, 33, 100], query_lens=[1] * 4, num_heads=6, head_dim=80, dtype=dtype)
    out = decode_attention(
        case.q, case.kv, case.block_tables, case.seq_lens, scale=case.scale, sinks=case.sinks, backend=backend
    )
    return [out]


def prefilled(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    case = PagedCase(lengths=[40, 0, 100, 1], query_lens=[40, 0, 7, 1], num_heads=6, head_dim=80, dtype=dtype)
    out = prefill_attention(
        case.q,
        case.kv,
        case.block_tables,
        case.query_starts,
        case.seq_lens,
        scale=case.scale,
        max_query_len=case.max_query_len,
        sliding_window=33,
        backend=backend,
    )
    return [out]


def normed(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    """The residual stays fp32 whatever x is."""
    generator = torch.Generator().manual_seed(1)
    x, weight = random_tensor(generator, 5, 65, dtype=dtype), random_tensor(generator, 65, dtype=dtype)
    residual = random_tensor(generator, 5, 65)
    return [rms_norm(x, weight, 1e-5, residual=residual, backend=backend), residual]


def gated(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    return [silu_mul(random_tensor(torch.Generator().manual_seed(2), 3, 2 * 33, dtype=dtype), backend=backend)]


def rotated(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    qkv = random_tensor(generator, 4, 10 * 16, dtype=dtype)
    q, k, v = (part.view(4, -1, 16) for part in qkv.split([6 * 16, 2 * 16, 2 * 16], 1))
    kv = poisoned(4, 2, 2, 16, 16, dtype=dtype)
    angles = torch.rand(50, 6, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    rope_and_write(q, k, v, torch.tensor([3, 4, 5, 49]), cos_sin, kv, torch.tensor([16, 17, -1, 63]), backend=backend)
    return [q, kv.isnan().float(), kv.nan_to_num()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [decoded, prefilled, normed, gated, rotated], ids=lambda op: op.__name__)
@pytest.mark.usefixtures("is_compiled")
def test_ops_match_the_reference_with_and_without_the_extension(
    op: Callable[[Backend, torch.dtype], list[Tensor]], dtype: torch.dtype
) -> None:
    actual, expected = op(Backend.CPU, dtype), op(Backend.REFERENCE, dtype)

    for one, wanted in zip(actual, expected, strict=True):
        assert_close(one, wanted)


@pytest.mark.parametrize("vocab_size", [1, 63, 200, 5001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.usefixtures("is_compiled")
def test_draws_among_excluded_ids_are_those_of_the_wire(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_tensor(generator, 4, vocab_size) * spread
    logits[1:3] = logits[1:3].masked_fill(torch.rand(2, vocab_size, generator=generator) < 0.7, float("-inf"))
    logits[3] = float("-inf")
    seeds, positions = torch.tensor([0, -1, 2**63 - 1, 5]), torch.tensor([0, 9, 2**31 + 7, 1])

    ids = sampler.gumbel_argmax(logits, seeds, positions, backend=Backend.CPU).tolist()

    assert ids == [
        wire_draw(row, seed, position)
        for row, seed, position in zip(logits.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    ]


def wire_draw(logits: list[float], seed: int, position: int) -> int:
    """The draw by Python floats; the first id where all are excluded."""
    return max(range(len(logits)), key=lambda i: logits[i] - math.log(-math.log(rng.uniform(seed, position, i))))


def test_both_ways_draw_the_same_ids_from_rows_of_a_wider_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    if not extension.is_available():
        pytest.skip("the C++ extension was not built")
    logits = (torch.randn(64, 6000, generator=torch.Generator().manual_seed(4)) * 2)[:, :5001]
    seeds, positions = torch.arange(64) * 7919, torch.arange(64)

    compiled = sampler.gumbel_argmax(logits, seeds, positions, backend=Backend.CPU)
    monkeypatch.setattr(extension, "is_available", lambda: False)

    assert torch.equal(compiled, sampler.gumbel_argmax(logits.contiguous(), seeds, positions, backend=Backend.CPU))
