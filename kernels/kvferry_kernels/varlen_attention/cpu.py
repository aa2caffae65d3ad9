"""Prefill attention on CPUs: torch's flash kernel per sequence over gathered keys and values, in chunks of queries.

Keys are shared by a group of query heads through a stride of zero, not by copies. Chunks keep the work near the causal
triangle whatever the length of the cached prefix, since the kernel itself knows causality only without a prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels.cpu_attention import compiled_attention, gather_keys_values, soft_capped, softmax_with_sinks

QUERY_CHUNK = 256
COMPILED_TOKENS = 1024
"""Up to this many new tokens of one sequence the C++ extension is faster: 1.5 times at 128 or 512 in one prompt, twice for
8 prompts of 128; at 2048 torch's kernel is, 1.4 times (bf16, 2 threads, EPYC with AVX512, torch 2.15, 2026-12-01)."""


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
    if q.shape[0] <= COMPILED_TOKENS or int(query_starts.diff().max()) <= COMPILED_TOKENS:
        compiled = compiled_attention(
            q, kv, block_tables, query_starts, seq_lens, scale, sliding_window, soft_cap, sinks
        )
        if compiled is not None:
            return compiled
    num_kv_heads, block_size = kv.shape[2:4]
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype)
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, group, 1)
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        first_query = length - (end - begin)
        first_key = max(0, first_query - sliding_window + 1) if sliding_window else 0
        first_block = first_key // block_size
        table = block_tables[row : row + 1, first_block : -(-length // block_size)]
        keys, values = (tensor[0, :, None] for tensor in gather_keys_values(kv, table))
        keys_origin = first_block * block_size
        causal_whole = first_query == 0 and not sliding_window and not soft_cap
        chunk = end - begin if causal_whole else QUERY_CHUNK
        for chunk_begin in range(begin, end, chunk):
            chunk_end = min(end, chunk_begin + chunk)
            low, high = first_query + chunk_begin - begin, first_query + chunk_end - begin
            key_low = max(0, low - sliding_window + 1) if sliding_window else 0
            visible = slice(key_low - keys_origin, high - keys_origin)
            queries = q[chunk_begin:chunk_end].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
            mask = None if causal_whole or high - low == 1 else _mask(low, high, key_low, sliding_window, q.dtype)
            attended = _attend(
                queries, keys[:, :, visible], values[:, :, visible], mask, causal_whole, scale, soft_cap, sinks
            )
            out[chunk_begin:chunk_end] = attended.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)
    return out


def _mask(low: int, high: int, key_low: int, sliding_window: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [1, 1, high - low, high - key_low] of query positions low .. high."""
    query_positions = torch.arange(low, high)[:, None]
    key_positions = torch.arange(key_low, high)
    hidden = key_positions > query_positions
    if sliding_window:
        hidden |= key_positions <= query_positions - sliding_window
    return torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [KH, G, T, D] of queries [KH, G, T, D] over keys and values [KH, 1, L, D]."""
    if soft_cap:
        scores = soft_capped(torch.matmul(queries.float(), keys.float().transpose(-1, -2)).mul_(scale), soft_cap)
        if mask is not None:
            scores += mask
        weights = softmax_with_sinks(scores, None if sinks is None else sinks[..., None])
        return torch.matmul(weights.to(values.dtype), values)
    out: Tensor
    num_kv_heads, group = queries.shape[:2]
    shape = (num_kv_heads, group, *keys.shape[2:])
    out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys.expand(shape), values.expand(shape), 0.0, causal, attn_mask=mask, scale=scale
    )
    # The sinks' share of the mass is exp(sink - total); what is left of it goes to the keys.
    return out if sinks is None else out * torch.sigmoid(log_sum_exp - sinks)[..., None]
