"""Arithmetic that several Triton kernels share, so that each formula has one name and one place.

Everything here is inlined into the kernels; host code uses only `COMPILE_OPTIONS` and `is_interpreted`.
"""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs

# Triton 3.9 fuses multiply-add by default and 3.10 will not: named, so that results do not drift between versions.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def is_interpreted() -> bool:
    """Return whether kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1 before the first import)."""
    return bool(_INTERPRETED.value)


@triton.jit
def dot_operand(x):
    """Pass x to a matrix product: as it is on a GPU, in fp32 in the interpreter, whose numpy has no bf16."""
    if _INTERPRETED:
        return x.to(tl.float32)
    return x


@triton.jit
def scaled_log2(products, scale, SOFT_CAP: tl.constexpr):
    """Return scores ready for exp2: products * scale, soft-capped unless SOFT_CAP is 0, times log2(e).

    The soft cap is CAP * tanh(score / CAP) with tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates instead of giving NaN.
    """
    if SOFT_CAP > 0.0:
        exponential = tl.exp2(products * (scale * (2.0 * LOG2_E / SOFT_CAP)))
        return (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (exponential + 1.0))
    return products * (scale * LOG2_E)


@triton.jit
def finite_or_zero(maximum):
    """Return a maximum that may be subtracted: -inf (nothing seen yet) becomes 0, so exp(-inf - 0) is 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def slot_offsets(
    table, tile_start, end, stride_block, SLOT_ELEMENTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Return the int64 element offsets [TILE] of the slots that hold tokens tile_start .. tile_start + TILE of a sequence.

    A tile inside one block reads the table once; a tile over several blocks reads it per token. Tokens from `end` on
    get the offsets of block 0, to be masked by the caller.
    """
    tokens = tile_start + tl.arange(0, TILE)
    if BLOCK_SIZE >= TILE:
        block = tl.load(table + tile_start // BLOCK_SIZE).to(tl.int64)
        return block * stride_block + ((tile_start % BLOCK_SIZE) + tl.arange(0, TILE)) * SLOT_ELEMENTS
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
    return blocks * stride_block + (tokens % BLOCK_SIZE) * SLOT_ELEMENTS


@triton.jit
def load_slots(pointers, tokens, dims, end, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values [TILE, D] at pointers [TILE, D], zeros behind HEAD_DIM and, where MASKED, for tokens from `end` on."""
    if MASKED:
        return tl.load(pointers, (tokens < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if pointers.shape[1] == HEAD_DIM:
        return tl.load(pointers)
    return tl.load(pointers, (dims < HEAD_DIM)[None, :], other=0.0)
