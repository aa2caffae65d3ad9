"""Attention of new tokens over a paged cache as the formula says it, one sequence at a time in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def cached_keys_values(kv: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` keys and values [KH, length, D] fp32 of the sequence with `block_table` [M]."""
    block_size = kv.shape[3]
    blocks = kv[block_table[: -(-length // block_size)].long()].float()
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """Return attention [T, H, D] fp32 of queries q [T, H, D], the last T positions, over keys and values [KH, L, D]."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hld->htl", q.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_positions = torch.arange(length - num_queries, length, device=q.device)[:, None]
    key_positions = torch.arange(length, device=q.device)[None, :]
    visible = key_positions <= query_positions
    if sliding_window:
        visible &= key_positions > query_positions - sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :length]
    return torch.einsum("htl,hld->thd", weights, values)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See `varlen_attention.prefill_attention`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if starts[row + 1] > starts[row]:
            keys, values = cached_keys_values(kv, block_tables[row], length)
            out[queries] = attend(q[queries], keys, values, scale, sliding_window, soft_cap, sinks).to(q.dtype)
    return out
