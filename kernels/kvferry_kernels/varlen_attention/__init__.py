"""Causal attention of many new tokens per sequence over paged keys and values, cached prefix included."""

from __future__ import annotations

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.varlen_attention import cpu, reference

__all__ = ["prefill_attention"]


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return causal attention of the new tokens, [T, H, D] contiguous in the dtype of q.

    q [T, H, D]: heads and dims dense, tokens may be strided. Sequence b owns tokens query_starts[b] .. query_starts[b + 1]
    (int32 [B + 1]), the last positions of its seq_lens[b] (int32 [B]); their keys and values are already in
    kv [N, 2, KH, S, D] (contiguous) through block_tables [B, M] int32. max_query_len is at least the longest of them. A
    sequence may have no queries; tokens of q outside all sequences yield unspecified values.
    sliding_window, soft_cap and sinks as in `paged_attention.decode_attention`.
    """
    match choose(backend, q):
        case Backend.CPU:
            return cpu.prefill_attention(
                q, kv, block_tables, query_starts, seq_lens, scale, sliding_window, soft_cap, sinks
            )
        case Backend.REFERENCE:
            return reference.prefill_attention(
                q, kv, block_tables, query_starts, seq_lens, scale, sliding_window, soft_cap, sinks
            )
        case Backend.TRITON:
            from kvferry_kernels.varlen_attention import triton

            return triton.prefill_attention(
                q, kv, block_tables, query_starts, seq_lens, scale, max_query_len, sliding_window, soft_cap, sinks
            )
