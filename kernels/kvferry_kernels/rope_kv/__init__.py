"""Rotary embedding of queries and keys, fused with writing keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.rope_kv import cpu, reference

__all__ = ["rope_and_write"]


def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    slots: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Rotate q in place and write rotated k, and v, into the cache; the arithmetic is fp32.

    q [T, H, D], k and v [T, KH, D]: heads and dims dense, tokens may be strided (views of the merged qkv). k may be
    overwritten: what it holds afterwards is unspecified. positions [T] int64 index cos_sin [P, R] fp32: R/2 cosines, then
    R/2 sines; the first R <= D dims of a head are rotated, halves against each other ("neox"). kv [N, 2, KH, S, D]
    contiguous; slots [T] int64 are block * S + offset, negative ones (padding) are not written.
    """
    match choose(backend, q):
        case Backend.CPU:
            cpu.rope_and_write(q, k, v, positions, cos_sin, kv, slots)
        case Backend.REFERENCE:
            reference.rope_and_write(q, k, v, positions, cos_sin, kv, slots)
        case Backend.TRITON:
            from kvferry_kernels.rope_kv import triton

            triton.rope_and_write(q, k, v, positions, cos_sin, kv, slots)
