"""Random, odd-sized inputs for every kernel, each as a function of backend and device; `gpu_check` compares their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry_kernels import sampler, staging
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.merge import merge_states
from kvferry_kernels.paged_attention import decode_attention
from kvferry_kernels.rms_norm import rms_norm
from kvferry_kernels.rope_kv import rope_and_write
from kvferry_kernels.silu_mul import silu_mul
from kvferry_kernels.testing import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_COUNTS,
    HEAD_DIMS,
    ODD_SIZES,
    PagedCase,
    assert_close,
    poisoned,
)
from kvferry_kernels.varlen_attention import prefill_attention

KernelRun = Callable[[Backend, str], list[Tensor]]
"""One call of an op over fixed inputs, by a backend on a device; returns everything it wrote."""
ATTENTION_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 33}, {"sinks": True}, {"soft_cap": 5.0})


def compare(runs: Iterable[KernelRun], device: str) -> tuple[int, float]:
    """Return the number of outputs and their largest difference from the reference's. Raises AssertionError beyond tolerance."""
    count, largest = 0, 0.0
    for run in runs:
        for actual, expected in zip(run(Backend.TRITON, device), run(Backend.REFERENCE, "cpu"), strict=True):
            assert_close(actual.cpu(), expected)
            difference = (actual.cpu().double() - expected.double()).nan_to_num(0.0, 0.0, 0.0).abs()
            largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
            count += 1
    return count, largest


def attention_cases(is_tiny: bool, lengths: list[int], query_lens: list[int]) -> Iterator[KernelRun]:
    """All pairs of head size and block size; dtypes, head counts and options in turns."""
    for index in range(4 if is_tiny else len(HEAD_DIMS) * len(BLOCK_SIZES)):
        num_heads, num_kv_heads = HEAD_COUNTS[index // 5 % len(HEAD_COUNTS)]
        case = PagedCase(
            lengths=lengths,
            query_lens=query_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIMS[index % len(HEAD_DIMS)],
            block_size=BLOCK_SIZES[index % len(BLOCK_SIZES)],
            dtype=DTYPES[index % len(DTYPES)],
            seed=index,
        )
        yield partial(attend, case, ATTENTION_OPTIONS[index % 7 % len(ATTENTION_OPTIONS)])


def attend(case: PagedCase, options: dict[str, Any], backend: Backend, device: str) -> list[Tensor]:
    """Decode or prefill attention of a case: decode where every sequence has one query."""
    q, kv, tables, starts, lengths, sinks = (
        tensor.to(device)
        for tensor in (case.q, case.kv, case.block_tables, case.query_starts, case.seq_lens, case.sinks)
    )
    more = {**options, "sinks": sinks if "sinks" in options else None, "scale": case.scale, "backend": backend}
    if set(case.query_lens) == {1}:
        return [decode_attention(q, kv, tables, lengths, **more)]
    return [prefill_attention(q, kv, tables, starts, lengths, max_query_len=case.max_query_len, **more)]


def decode_cases(is_tiny: bool) -> Iterator[KernelRun]:
    lengths = [1, 0, 33, 100] if is_tiny else [1, 0, 16, 33, 127, 1300]
    return attention_cases(is_tiny, lengths, [1] * len(lengths))


def prefill_cases(is_tiny: bool) -> Iterator[KernelRun]:
    lengths, query_lens = ([40, 1, 50], [40, 1, 7]) if is_tiny else ([210, 0, 100, 1, 65], [150, 0, 7, 1, 65])
    return attention_cases(is_tiny, lengths, query_lens)


def merge_cases(is_tiny: bool) -> Iterator[KernelRun]:
    for num_parts, head_dim in ((1, 16), (3, 80), (17, 128)):
        values, lse = torch.randn(5, num_parts, head_dim), torch.randn(5, num_parts)
        lse[1, 0], values[1, 0], lse[2], values[2] = -math.inf, math.nan, -math.inf, math.nan
        yield partial(merge, values, lse)


def merge(values: Tensor, lse: Tensor, backend: Backend, device: str) -> list[Tensor]:
    return list(merge_states(values.to(device), lse.to(device), torch.float32, backend=backend))


def elementwise_cases(is_tiny: bool) -> Iterator[KernelRun]:
    for index, width in enumerate([*ODD_SIZES, 576]):
        yield partial(norm_and_gate, torch.randn(7, 2 * width).to(DTYPES[index % len(DTYPES)]))


def norm_and_gate(x: Tensor, backend: Backend, device: str) -> list[Tensor]:
    """Norm with an fp32 residual of the first half's width, and the activation of the whole."""
    x, residual = x.to(device), x.float().roll(1, 0).chunk(2, -1)[0].contiguous().to(device)
    first = x.chunk(2, -1)[0].contiguous()
    return [rms_norm(first, first[0], 1e-5, residual=residual, backend=backend), residual, silu_mul(x, backend=backend)]


def rope_cases(is_tiny: bool) -> Iterator[KernelRun]:
    for index, (head_dim, rotary_dim) in enumerate(((16, 16), (80, 80), (96, 48), (128, 128))):
        angles = torch.rand(100, rotary_dim // 2) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        yield partial(rotate, torch.randn(5, 13, head_dim).to(DTYPES[index % len(DTYPES)]), cos_sin)


def rotate(qkv: Tensor, cos_sin: Tensor, backend: Backend, device: str) -> list[Tensor]:
    """9 query heads and 2 KV heads, views of one tensor; one token is padding."""
    q, k, v = torch.split(qkv.to(device, copy=True), [9, 2, 2], 1)
    kv = poisoned(4, 2, 2, 16, qkv.shape[2], dtype=qkv.dtype, device=device)
    positions, slots = torch.tensor([3, 4, 99, 50, 0]), torch.tensor([16, 17, -1, 63, 0])
    rope_and_write(q, k, v, positions.to(device), cos_sin.to(device), kv, slots.to(device), backend=backend)
    return [q, kv.isnan().double(), kv.nan_to_num()]


def sampler_cases(is_tiny: bool) -> Iterator[KernelRun]:
    for vocab_size in (1, 65, 1100) if is_tiny else (1, 65, 1100, 49152, 151936):
        logits = torch.randn(4, vocab_size) * 3
        logits[1, vocab_size // 2 + 1 :] = -math.inf
        yield partial(sample, logits, torch.rand(4, vocab_size) < 0.2, torch.randint(0, 4, (4, vocab_size)).int())


def sample(logits: Tensor, prompt_mask: Tensor, counts: Tensor, backend: Backend, device: str) -> list[Tensor]:
    logits, prompt_mask, counts = logits.to(device), prompt_mask.to(device), counts.to(device)
    seeds, positions = torch.tensor([0, -1, 2**63 - 1, 7]).to(device), torch.tensor([0, 5, 2**31, 1]).to(device)
    penalised, truncated = logits.clone(), logits.clone()
    strengths = (torch.full((4,), value, device=device) for value in (0.7, 0.3, 1.3))
    sampler.apply_penalties(penalised, prompt_mask, counts, *strengths, backend=backend)
    # The reference's top-p looks at all pairs of ids: compared on small vocabularies only.
    top_p = torch.tensor([1.0, 0.9, 0.5, 1.0]) if logits.shape[1] <= 1100 else torch.ones(4)
    limits = (torch.tensor([0, 40, 0, 7]).int(), top_p, torch.tensor([0.1, 0.0, 0.0, 0.0]))
    sampler.top_k_top_p_min_p(truncated, *(limit.to(device) for limit in limits), backend=backend)
    drawn = sampler.gumbel_argmax(logits, seeds, positions, backend=backend)
    return [drawn.double(), sampler.greedy(logits, backend=backend).double(), penalised, truncated]


def staging_cases(is_tiny: bool) -> Iterator[KernelRun]:
    for dtype in DTYPES:
        for layers, heads in (((0, 4), (0, 3)), ((1, 3), (2, 3))):
            yield partial(ferry, torch.randn(4, 5, 2, 3, 16, 24).to(dtype), layers, heads)


def ferry(
    cache: Tensor, layers: tuple[int, int], heads: tuple[int, int], backend: Backend, device: str
) -> list[Tensor]:
    """Gather blocks, scatter them, and both checksums, as 16-bit pieces since a double holds no 64-bit number."""
    cache, blocks = cache.to(device), torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    out, target = torch.zeros(300_000, dtype=torch.uint8, device=device), torch.zeros_like(cache)
    size, sums = staging.gather_blocks_checksum(cache, blocks, layers, heads, out, backend=backend)
    again = staging.scatter_blocks_checksum(out[:size], target, blocks, layers, heads, backend=backend)
    pieces = [float(word >> shift & 0xFFFF) for word in (*sums, *again) for shift in (0, 16, 32, 48)]
    return [out.double(), target, torch.tensor(pieces)]


CASES: dict[str, Callable[[bool], Iterator[KernelRun]]] = {
    "decode_attention": decode_cases,
    "prefill_attention": prefill_cases,
    "merge": merge_cases,
    "rms_norm_silu_mul": elementwise_cases,
    "rope_kv": rope_cases,
    "sampler": sampler_cases,
    "staging": staging_cases,
}
