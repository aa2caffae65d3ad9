"""What the two CPU attention paths share: one-copy gathering of cache blocks, and attention over gathered keys.

The cache is read with a single `index_select` per call that returns keys and values head by head, so no second copy makes
them contiguous. Decode continues in `paged_attention.cpu`, prefill in `varlen_attention.cpu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels import extension

MAX_GROUP = 32
"""Most query heads per KV head that the extension handles."""


def compiled_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """Attend with the C++ extension, arguments as in `varlen_attention.prefill_attention`; None where it cannot be used."""
    num_heads, head_dim = q.shape[1:]
    is_usable = q.stride(2) == 1 and q.stride(1) == head_dim and num_heads // kv.shape[2] <= MAX_GROUP
    if not is_usable or not extension.is_available():
        return None
    out = torch.empty(q.shape, dtype=q.dtype)
    torch.ops.kvferry.attention(
        out, q, kv, block_tables, query_starts, seq_lens, scale, sliding_window, soft_cap, sinks
    )
    return out


def gather_keys_values(kv: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the blocks of `block_tables` [B, M] out of kv [N, 2, KH, S, D]: keys and values [B, KH, M*S, D], contiguous."""
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    batch, num_blocks = block_tables.shape
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)
    rows = block_tables.long().view(1, batch, 1, num_blocks) * (2 * num_kv_heads) + heads
    gathered = kv.view(-1, block_size * head_dim).index_select(0, rows.view(-1))
    keys, values = gathered.view(2, batch, num_kv_heads, num_blocks * block_size, head_dim).unbind(0)
    return keys, values


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the fp32 softmax of scores [..., L] over the last axis, a sink logit [..., 1] taking its share of the mass."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    extended = torch.cat((scores.float(), sinks.float().expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(extended, -1)[..., :-1]


def soft_capped(scores: Tensor, soft_cap: float) -> Tensor:
    """Return soft_cap * tanh(scores / soft_cap), computed in place on fp32 scores."""
    return scores.div_(soft_cap).tanh_().mul_(soft_cap)
