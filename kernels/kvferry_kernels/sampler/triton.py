"""Sampling on the GPU: draws over tiles of the vocabulary that are merged per row, and truncation by bisection, never sorts.

Logits order like their bits once negative ones are flipped, so a threshold is found in at most 32 passes over a row that
stays in the second-level cache.
"""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import COMPILE_OPTIONS
from kvferry_kernels.sampler import random_numbers as rn
from kvferry_kernels.variants import Arch, Launch, Variant

TILE = 1024
# Vocabulary ids of one program of a draw: a vocabulary of 128 k is read by 32 programs.
DRAW_SPAN = 4096
TRUNCATE_TILE = 4096
LAUNCH = Launch(num_warps=4, num_stages=1)
TRUNCATE_LAUNCH = Launch(num_warps=16, num_stages=1)

K1 = tl.constexpr(rn.K1)
K2 = tl.constexpr(rn.K2)
MIX_A = tl.constexpr(rn.MIX_A)
MIX_B = tl.constexpr(rn.MIX_B)
UNIFORM_SHIFT = tl.constexpr(rn.UNIFORM_SHIFT)
UNIFORM_SCALE = tl.constexpr(rn.UNIFORM_SCALE)
MINUS_INF_KEY = tl.constexpr(-(1 << 31) + (1 << 23) - 1)


@triton.jit
def mix64(z):
    """Return the SplitMix64 finaliser of uint64 numbers."""
    z = (z ^ (z >> 30)) * MIX_A
    z = (z ^ (z >> 27)) * MIX_B
    return z ^ (z >> 31)


@triton.jit
def gumbel(key, ids):
    """Return the fp32 Gumbel numbers -log(-log(u)) of a row's uint64 key and token ids [n]."""
    bits = mix64(key + ids.to(tl.uint64) * K2) >> UNIFORM_SHIFT
    return -tl.log(-tl.log((bits.to(tl.int32).to(tl.float32) + 0.5) * UNIFORM_SCALE))


@triton.jit
def ordered_key(values):
    """Return int32 keys that order like the fp32 values; -0.0 counts as 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_value(key):
    """Return the fp32 value of an int32 key, the inverse of `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def draw_kernel(
    best_scores,
    best_ids,
    logits,
    seeds,
    positions,
    vocab_size,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the best score and its lowest id in one span of a row; program (row, span).

    best_scores [B, P] fp32; best_ids [B, P] int64; logits [B, V] fp32; seeds and positions [B] int64, or both None for the
    plain maximum. vocab_size = V; SPAN ids, TILE at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    if seeds is not None:
        position = tl.load(positions + row).to(tl.uint64)
        key = mix64(tl.load(seeds + row).to(tl.uint64) + (position + 1) * K1)
    lanes = tl.arange(0, TILE)
    scores = tl.full([TILE], float("-inf"), tl.float32)
    winners = span * SPAN + lanes
    for start in range(span * SPAN, tl.minimum(span * SPAN + SPAN, vocab_size), TILE):
        ids = start + lanes
        values = tl.load(logits + row * vocab_size + ids, ids < vocab_size, other=float("-inf"))
        if seeds is not None:
            values += gumbel(key, ids)
        better = values > scores
        scores = tl.where(better, values, scores)
        winners = tl.where(better, ids, winners)
    best = tl.max(scores, 0)
    winner = tl.min(tl.where(scores == best, winners, 0x7FFFFFFF), 0)
    tl.store(best_scores + row * tl.num_programs(1) + span, best)
    tl.store(best_ids + row * tl.num_programs(1) + span, winner.to(tl.int64))


@triton.jit
def pick_kernel(ids, best_scores, best_ids, num_spans, SPANS: tl.constexpr):
    """Merge the spans of a row; program (row). ids [B] int64; best_scores [B, P] fp32; best_ids [B, P] int64; num_spans = P."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, SPANS)
    scores = tl.load(best_scores + row * num_spans + lanes, lanes < num_spans, other=float("-inf"))
    winners = tl.load(best_ids + row * num_spans + lanes, lanes < num_spans, other=0x7FFFFFFF)
    best = tl.max(scores, 0)
    tl.store(ids + row, tl.min(tl.where(scores == best, winners, 0x7FFFFFFF), 0))


@triton.jit
def penalties_kernel(
    logits, prompt_mask, output_counts, presence, frequency, repetition, vocab_size, TILE: tl.constexpr
):
    """Penalise TILE ids of a row in place; program (row, tile).

    logits [B, V] fp32; prompt_mask [B, V] int8 (0 or 1); output_counts [B, V] int32; presence, frequency and repetition [B]
    fp32; vocab_size = V.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = ids < vocab_size
    offsets = row * vocab_size + ids
    values = tl.load(logits + offsets, mask, other=0.0)
    counts = tl.load(output_counts + offsets, mask, other=0)
    seen = (counts > 0) | (tl.load(prompt_mask + offsets, mask, other=0) != 0)
    factor = tl.where(seen, tl.load(repetition + row), 1.0)
    values = tl.where(values > 0, values / factor, values * factor)
    values -= tl.load(frequency + row) * counts.to(tl.float32)
    values -= tl.where(counts > 0, tl.load(presence + row), 0.0)
    tl.store(logits + offsets, values, mask)


@triton.jit
def count_at_least(row_logits, threshold, vocab_size, TILE: tl.constexpr):
    """Return how many logits of a row have keys of at least `threshold`, int32."""
    lanes = tl.arange(0, TILE)
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + lanes
        values = tl.load(row_logits + ids, ids < vocab_size, other=float("-inf"))
        counts += ((ordered_key(values) >= threshold) & (ids < vocab_size)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def mass_at_least(row_logits, threshold, top, vocab_size, TILE: tl.constexpr):
    """Return the sum of exp(logit - top) over logits with keys of at least `threshold`, fp32."""
    lanes = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        ids = start + lanes
        values = tl.load(row_logits + ids, ids < vocab_size, other=float("-inf"))
        masses += tl.where(ordered_key(values) >= threshold, tl.exp(values - top), 0.0)
    return tl.sum(masses, 0)


@triton.jit
def truncate_kernel(logits, top_k, top_p, min_p, vocab_size, TILE: tl.constexpr):
    """Apply min-p, top-k and top-p to one row in place; program (row).

    logits [B, V] fp32; top_k [B] int32; top_p and min_p [B] fp32; vocab_size = V. Thresholds are int32 keys of
    `ordered_key`; each bisection finds the largest key at which the count, or the mass, still suffices.
    """
    row_logits = logits + tl.program_id(0).to(tl.int64) * vocab_size
    k = tl.load(top_k + tl.program_id(0))
    p = tl.load(top_p + tl.program_id(0))
    floor = tl.load(min_p + tl.program_id(0))
    lanes = tl.arange(0, TILE)
    tops = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        ids = start + lanes
        tops = tl.maximum(tops, tl.load(row_logits + ids, ids < vocab_size, other=float("-inf")))
    top = tl.max(tops, 0)
    top_key = ordered_key(top)
    threshold = top_key * 0 + MINUS_INF_KEY
    if floor > 0.0:
        threshold = ordered_key(top + tl.log(floor))
    if (k > 0) & (k < vocab_size):
        low = threshold.to(tl.int64)
        high = top_key.to(tl.int64)
        if count_at_least(row_logits, threshold, vocab_size, TILE) >= k:
            while low < high:
                middle = low + (high - low + 1) // 2
                if count_at_least(row_logits, middle.to(tl.int32), vocab_size, TILE) >= k:
                    low = middle
                else:
                    high = middle - 1
        threshold = low.to(tl.int32)
    if p < 1.0:
        wanted = p * mass_at_least(row_logits, threshold, top, vocab_size, TILE)
        low = threshold.to(tl.int64)
        high = top_key.to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            if mass_at_least(row_logits, middle.to(tl.int32), top, vocab_size, TILE) >= wanted:
                low = middle
            else:
                high = middle - 1
        threshold = low.to(tl.int32)
    if threshold > MINUS_INF_KEY:
        bound = ordered_value(threshold)
        for start in range(0, vocab_size, TILE):
            ids = start + lanes
            values = tl.load(row_logits + ids, ids < vocab_size, other=float("-inf"))
            tl.store(row_logits + ids, tl.where(values >= bound, values, float("-inf")), ids < vocab_size)


def greedy(logits: Tensor) -> Tensor:
    """See `sampler.greedy`."""
    return _draw(logits, None, None)


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `sampler.gumbel_argmax`."""
    return _draw(logits, seeds, positions)


def _draw(logits: Tensor, seeds: Tensor | None, positions: Tensor | None) -> Tensor:
    batch, vocab_size = logits.shape
    num_spans = triton.cdiv(vocab_size, DRAW_SPAN)
    ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return ids
    best_scores = torch.empty(batch, num_spans, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(batch, num_spans, dtype=torch.int64, device=logits.device)
    options = {"num_warps": LAUNCH.num_warps, "num_stages": LAUNCH.num_stages, **COMPILE_OPTIONS}
    draw_kernel[(batch, num_spans)](
        best_scores, best_ids, logits, seeds, positions, vocab_size, SPAN=DRAW_SPAN, TILE=TILE, **options
    )
    pick_kernel[(batch,)](ids, best_scores, best_ids, num_spans, SPANS=triton.next_power_of_2(num_spans), **options)
    return ids


def apply_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """See `sampler.apply_penalties`."""
    batch, vocab_size = logits.shape
    if batch:
        penalties_kernel[(batch, triton.cdiv(vocab_size, TILE))](
            logits,
            prompt_mask.view(torch.int8),
            output_counts,
            presence,
            frequency,
            repetition,
            vocab_size,
            TILE=TILE,
            num_warps=LAUNCH.num_warps,
            num_stages=LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )


def top_k_top_p_min_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """See `sampler.top_k_top_p_min_p`."""
    batch, vocab_size = logits.shape
    if batch:
        truncate_kernel[(batch,)](
            logits,
            top_k,
            top_p,
            min_p,
            vocab_size,
            TILE=TRUNCATE_TILE,
            num_warps=TRUNCATE_LAUNCH.num_warps,
            num_stages=TRUNCATE_LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    draw_types = {"best_scores": "*fp32", "best_ids": "*i64", "logits": "*fp32"}
    draw_constants = {"SPAN": DRAW_SPAN, "TILE": TILE}
    sampled_types = draw_types | {"seeds": "*i64", "positions": "*i64", "vocab_size": "i32"}
    greedy_types = draw_types | {"vocab_size": "i32"}
    return [
        Variant(kernel=draw_kernel, label="sampled", types=sampled_types, constants=draw_constants, launch=LAUNCH),
        Variant(
            kernel=draw_kernel,
            label="greedy",
            types=greedy_types,
            constants=draw_constants | {"seeds": None, "positions": None},
            launch=LAUNCH,
        ),
        Variant(
            kernel=pick_kernel,
            label="32 spans",
            types={"ids": "*i64", "best_scores": "*fp32", "best_ids": "*i64", "num_spans": "i32"},
            constants={"SPANS": 32},
            launch=LAUNCH,
            unaligned=("num_spans",),
        ),
        Variant(
            kernel=penalties_kernel,
            label="fp32",
            types={
                "logits": "*fp32",
                "prompt_mask": "*i8",
                "output_counts": "*i32",
                "presence": "*fp32",
                "frequency": "*fp32",
                "repetition": "*fp32",
                "vocab_size": "i32",
            },
            constants={"TILE": TILE},
            launch=LAUNCH,
        ),
        Variant(
            kernel=truncate_kernel,
            label="fp32",
            types={"logits": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "vocab_size": "i32"},
            constants={"TILE": TRUNCATE_TILE},
            launch=TRUNCATE_LAUNCH,
        ),
    ]
