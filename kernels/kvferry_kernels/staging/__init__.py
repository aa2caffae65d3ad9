"""Moving KV blocks between the cache and contiguous transfer payloads, with the checksum that guards them on the way.

A payload holds layers a..b and KV heads a..b of some blocks in the order [layer][block][2][head][slot][dim]; its length is a
multiple of 8 bytes. The checksum is two wrapping int64 sums over its little-endian 8-byte words w_i: sum(w_i) and
sum(w_i * (i + 1)), so that swapped words show; a tail shorter than a word is padded with zeros.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.staging import cpu, reference

__all__ = ["checksum", "gather_blocks", "gather_blocks_checksum", "scatter_blocks", "scatter_blocks_checksum"]


def gather_blocks(
    storage: Tensor,
    blocks: Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    out: Tensor,
    *,
    backend: Backend | None = None,
) -> int:
    """Copy blocks [n] (int32) of storage [L, N, 2, KH, S, D] (contiguous) into out and return the payload's bytes.

    layers and heads are half-open ranges. out is uint8, one-dimensional, contiguous, on the device of storage, begins at a
    multiple of 8 bytes and is at least as long as the payload; bytes behind the payload stay as they are.
    """
    num_bytes: int = _implementation(backend, storage).gather_blocks(storage, blocks, layers, heads, out)
    return num_bytes


def gather_blocks_checksum(
    storage: Tensor,
    blocks: Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    out: Tensor,
    *,
    backend: Backend | None = None,
) -> tuple[int, tuple[int, int]]:
    """Do `gather_blocks` and return its bytes with the checksum of the payload; waits for the device."""
    num_bytes: int
    num_bytes, sums = _implementation(backend, storage).gather_blocks_checksum(storage, blocks, layers, heads, out)
    return num_bytes, sums


def scatter_blocks(
    payload: Tensor,
    storage: Tensor,
    blocks: Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    *,
    backend: Backend | None = None,
) -> None:
    """Copy a payload as made by `gather_blocks` into blocks [n] (int32, distinct) of storage; longer buffers are allowed."""
    _implementation(backend, storage).scatter_blocks(payload, storage, blocks, layers, heads)


def scatter_blocks_checksum(
    payload: Tensor,
    storage: Tensor,
    blocks: Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    *,
    backend: Backend | None = None,
) -> tuple[int, int]:
    """Do `scatter_blocks` and return the checksum of what was copied; waits for the device.

    The blocks are written before the sum is known: they must belong to nobody until the caller has compared it.
    """
    implementation = _implementation(backend, storage)
    sums: tuple[int, int] = implementation.scatter_blocks_checksum(payload, storage, blocks, layers, heads)
    return sums


def checksum(payload: Tensor, *, backend: Backend | None = None) -> tuple[int, int]:
    """Return the two sums of payload (uint8, one-dimensional, contiguous, beginning at a multiple of 8 bytes)."""
    sums: tuple[int, int] = _implementation(backend, payload).checksum(payload)
    return sums


def _implementation(backend: Backend | None, tensor: Tensor) -> ModuleType:
    match choose(backend, tensor):
        case Backend.CPU:
            return cpu
        case Backend.REFERENCE:
            return reference
        case Backend.TRITON:
            from kvferry_kernels.staging import triton

            return triton
