"""Rotary embedding (Su et al.: RoFormer, 2021; halves as in GPT-NeoX) and the cache write, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, D] with its first R dims rotated by cos and sin [T, R/2], in the dtype of x."""
    half = cos.shape[-1]
    x_f = x.float()
    first, second, rest = x_f[..., :half], x_f[..., half : 2 * half], x_f[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)


def rope_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv: Tensor, slots: Tensor
) -> None:
    """See `rope_kv.rope_and_write`."""
    cos, sin = cos_sin[positions].chunk(2, -1)
    q.copy_(rotated(q, cos, sin))
    keys = rotated(k, cos, sin)
    block_size = kv.shape[3]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv[slot // block_size, 0, :, slot % block_size] = keys[token]
            kv[slot // block_size, 1, :, slot % block_size] = v[token]
