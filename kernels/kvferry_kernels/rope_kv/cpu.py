"""Rotary embedding and cache write on CPUs: the C++ extension, else few, large torch operators.

Queries, keys and values that are views of one merged qkv are treated as one tensor: one rotation, one cache write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels import extension


def rope_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv: Tensor, slots: Tensor
) -> None:
    """See `rope_kv.rope_and_write`."""
    head_dim = q.shape[2]
    is_dense = all(tensor.stride(2) == 1 and tensor.stride(1) == head_dim for tensor in (q, k, v))
    if is_dense and cos_sin.is_contiguous() and extension.is_available():
        torch.ops.kvferry.rope_and_write(q, k, v, positions, cos_sin, kv, slots)
        return
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    merged = _joined(q, k)
    if merged is None:
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)
    else:
        _rotate(merged, cos, sin)
    keys_values = _joined(k, v)
    _write(torch.cat((k, v), 1) if keys_values is None else keys_values, kv, slots)


def _joined(first: Tensor, second: Tensor) -> Tensor | None:
    """Return [T, heads of first + heads of second, D] as a view where second lies right behind first, else None."""
    num_tokens, heads, head_dim = first.shape
    adjacent = (
        first.stride() == second.stride()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + heads * head_dim
        and first.stride(0) >= (heads + second.shape[1]) * head_dim
    )
    return first.as_strided((num_tokens, heads + second.shape[1], head_dim), first.stride()) if adjacent else None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [T, heads, D] in place by cos and sin [T, 1, R/2] fp32."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    first_f, second_f = first.float(), second.float()
    rotated = torch.addcmul(first_f * cos, second_f, sin, value=-1)
    second.copy_(torch.addcmul(second_f * cos, first_f, sin))
    first.copy_(rotated)


def _write(keys_values: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write keys_values [T, 2 KH, D] to their slots of kv."""
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        keys_values, slots = keys_values[kept], slots[kept]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    firsts = blocks * (2 * num_kv_heads - 1) * block_size + slots
    rows = firsts[:, None] + torch.arange(0, 2 * num_kv_heads * block_size, block_size)
    kv.view(-1, head_dim).index_copy_(0, rows.view(-1), keys_values.reshape(-1, head_dim))
