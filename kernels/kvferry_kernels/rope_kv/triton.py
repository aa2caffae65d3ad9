"""Rotary embedding and cache write on the GPU in one launch: queries, keys and values are each read once."""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import COMPILE_OPTIONS
from kvferry_kernels.variants import TRITON_TYPES, Arch, Launch, Variant

HEADS = 8
LAUNCH = Launch(num_warps=4, num_stages=1)


@triton.jit
def rope_write_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    kv,
    slots,
    stride_q,
    stride_k,
    stride_v,
    stride_block,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS heads of one token, or copy HEADS value heads; program (token, head tile over queries, keys, values).

    q [T, H, D] in place, k and v [T, KH, D], each with a stride between tokens; positions [T] int64; cos_sin [P, R] fp32;
    kv [N, 2, KH, S, D] with stride_block elements between blocks; slots [T] int64, negative: no write. NUM_HEADS = H;
    NUM_KV_HEADS = KH; BLOCK_SIZE = S; HEAD_DIM = D, padded to a power of two; ROTARY_DIM = R.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    key_heads = heads - NUM_HEADS
    value_heads = key_heads - NUM_KV_HEADS

    # Each dim pairs with the one half a rotation away; its rotation is x * cos + partner * sin with the sign of its half.
    rotated = dims < ROTARY_DIM
    partners = tl.where(dims < HALF, dims + HALF, tl.where(rotated, dims - HALF, dims))
    frequencies = tl.where(dims < HALF, dims, dims - HALF)
    angles = cos_sin + tl.load(positions + token) * ROTARY_DIM
    cos = tl.load(angles + frequencies, rotated, other=1.0)
    sin = tl.load(angles + HALF + frequencies, rotated, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)

    in_head = (dims < HEAD_DIM)[None, :]
    query_base = q + token * stride_q + heads[:, None] * HEAD_DIM
    key_base = k + token * stride_k + key_heads[:, None] * HEAD_DIM
    value_base = v + token * stride_v + value_heads[:, None] * HEAD_DIM
    query_mask = is_query[:, None] & in_head
    key_mask = is_key[:, None] & in_head
    value_mask = is_value[:, None] & in_head
    query = tl.load(query_base + dims[None, :], query_mask, other=0.0).to(tl.float32)
    query_partner = tl.load(query_base + partners[None, :], query_mask, other=0.0).to(tl.float32)
    key = tl.load(key_base + dims[None, :], key_mask, other=0.0).to(tl.float32)
    key_partner = tl.load(key_base + partners[None, :], key_mask, other=0.0).to(tl.float32)
    value = tl.load(value_base + dims[None, :], value_mask, other=0.0)
    # Both loads of every query have to be done before any store; threads of one warp may hold partners of another's.
    tl.debug_barrier()
    query = query * cos[None, :] + query_partner * sin[None, :]
    key = key * cos[None, :] + key_partner * sin[None, :]
    tl.store(query_base + dims[None, :], query.to(q.dtype.element_ty), query_mask)

    slot = tl.load(slots + token)
    if slot >= 0:
        block = kv + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * HEAD_DIM
        key_rows = block + key_heads[:, None] * (BLOCK_SIZE * HEAD_DIM)
        value_rows = block + (NUM_KV_HEADS + value_heads)[:, None] * (BLOCK_SIZE * HEAD_DIM)
        tl.store(key_rows + dims[None, :], key.to(kv.dtype.element_ty), key_mask)
        tl.store(value_rows + dims[None, :], value, value_mask)


def rope_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv: Tensor, slots: Tensor
) -> None:
    """See `rope_kv.rope_and_write`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    if num_tokens == 0:
        return
    rope_write_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))](
        q,
        k,
        v,
        positions,
        cos_sin,
        kv,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=triton.next_power_of_2(head_dim),
        ROTARY_DIM=cos_sin.shape[1],
        HEADS=HEADS,
        num_warps=LAUNCH.num_warps,
        num_stages=LAUNCH.num_stages,
        **COMPILE_OPTIONS,
    )


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    return [
        _variant(*case)
        for case in (
            (64, 64, 9, 3, torch.bfloat16),
            (128, 128, 32, 8, torch.bfloat16),
            (96, 48, 16, 16, torch.float16),
            (256, 256, 8, 4, torch.bfloat16),
        )
    ]


def _variant(head_dim: int, rotary_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Variant:
    name = TRITON_TYPES[dtype]
    types = dict.fromkeys(("q", "k", "v", "kv"), "*" + name)
    types |= {"positions": "*i64", "cos_sin": "*fp32", "slots": "*i64"}
    types |= dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_block"), "i32")
    return Variant(
        kernel=rope_write_kernel,
        label=f"D{head_dim} R{rotary_dim} H{num_heads}/{num_kv_heads} {name}",
        types=types,
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": 32,
            "HEAD_DIM": head_dim,
            "PADDED_HEAD_DIM": triton.next_power_of_2(head_dim),
            "ROTARY_DIM": rotary_dim,
            "HEADS": HEADS,
        },
        launch=LAUNCH,
    )
