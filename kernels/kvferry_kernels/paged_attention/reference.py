"""Decode attention as the formula says it: prefill attention with one query per sequence, the last position."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels.varlen_attention.reference import attend, cached_keys_values


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See `paged_attention.decode_attention`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            keys, values = cached_keys_values(kv, block_tables[row], length)
            out[row] = attend(q[row : row + 1], keys, values, scale, sliding_window, soft_cap, sinks)[0].to(q.dtype)
    return out
