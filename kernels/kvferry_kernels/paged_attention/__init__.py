"""Attention of one new token per sequence over its paged keys and values; prefill has its own op, `varlen_attention`."""

from __future__ import annotations

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.paged_attention import cpu, reference

__all__ = ["decode_attention"]


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return softmax(scale * q·K) V per sequence, [B, H, D] contiguous in the dtype of q.

    q [B, H, D]: heads and dims dense, rows may be strided (a view of the merged qkv). kv [N, 2, KH, S, D] contiguous, the
    new token's key and value already in it; H is a multiple of KH. block_tables [B, M] int32: entries past a sequence's
    blocks are not used. seq_lens [B] int32 count the new token; a row of length 0 yields zeros. sliding_window W > 0: the last W
    tokens are seen. soft_cap > 0: scores become soft_cap * tanh(score / soft_cap). sinks [H]: a logit per head that takes
    part in the softmax with a zero value.
    """
    match choose(backend, q):
        case Backend.CPU:
            return cpu.decode_attention(q, kv, block_tables, seq_lens, scale, sliding_window, soft_cap, sinks)
        case Backend.REFERENCE:
            return reference.decode_attention(q, kv, block_tables, seq_lens, scale, sliding_window, soft_cap, sinks)
        case Backend.TRITON:
            from kvferry_kernels.paged_attention import triton

            return triton.decode_attention(q, kv, block_tables, seq_lens, scale, sliding_window, soft_cap, sinks)
