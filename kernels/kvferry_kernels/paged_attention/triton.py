"""Decode attention on the GPU: long sequences are split over programs and merged, query heads of a group share one read.

A split covers a fixed number of tokens, taken from a table by the width of the block tables, so a sequence's result depends
on neither the batch nor the device, and the launch grid only on shapes: a captured graph stays valid. `merge` continues.
"""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import (
    COMPILE_OPTIONS,
    LN_2,
    LOG2_E,
    dot_operand,
    finite_or_zero,
    load_slots,
    scaled_log2,
    slot_offsets,
)
from kvferry_kernels.merge.triton import merge_states
from kvferry_kernels.variants import TRITON_TYPES, Arch, Launch, Variant, arch_of

# (longest sequence the block tables can describe, tokens per split): 4 to 64 splits, so that one sequence fills a device
# while the partial results stay below 2 % of what is read.
SPLIT_TABLE = ((1024, 256), (16384, 512), (65536, 1024), (262144, 4096))
LONGEST_SPLIT = 16384
# Rows of a matrix product: the smallest tile of the tensor cores.
MIN_ROWS = 16


@triton.jit
def decode_kernel(
    out,
    lse,
    q,
    kv,
    block_tables,
    seq_lens,
    sinks,
    scale,
    stride_q,
    stride_table,
    stride_block,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Attend with the query heads of one KV head to one split of one sequence; program (sequence, KV head, split).

    out [B, H, P, D] fp32 partial values, or [B, H, D] in the dtype of q where P = 1; lse [B, H, P] fp32 or None where P = 1;
    q [B, H, D] with stride_q elements between rows; kv [N, 2, KH, S, D] with stride_block elements between blocks;
    block_tables [B, M] int32 with stride_table between rows; seq_lens [B] int32; sinks [H] fp32 or None.
    GROUP = H / KH query heads, padded to ROWS; BLOCK_SIZE = S; HEAD_DIM = D, padded to a power of two; TILE keys at a time;
    SPLIT: tokens of a split; SLIDING_WINDOW and SOFT_CAP: 0 = none.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    num_splits = tl.num_programs(2)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    heads = kv_head * GROUP + rows
    # int64: [B, H, P, D] passes 2**31 elements at large batches.
    out_rows = (sequence * num_heads + heads).to(tl.int64) * num_splits + split

    length = tl.load(seq_lens + sequence)
    first_token = 0
    if SLIDING_WINDOW > 0:
        first_token = tl.maximum(length - SLIDING_WINDOW, 0)
    begin = first_token // TILE * TILE + split * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if begin >= end:
        if lse is None:
            zeros = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32).to(out.dtype.element_ty)
            mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], zeros, mask)
        else:
            tl.store(lse + out_rows, tl.full([ROWS], float("-inf"), tl.float32), rows < GROUP)
        return

    used = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        q + sequence.to(tl.int64) * stride_q + heads[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # noqa: SIM102  the outer condition is decided when compiling, the inner one on the device
        if split == 0:
            maximum = tl.load(sinks + heads, rows < GROUP, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)
    values = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * stride_table
    head_base = kv + kv_head * BLOCK_SIZE * HEAD_DIM
    value_offset = tl.num_programs(1) * BLOCK_SIZE * HEAD_DIM
    for tile_start in tl.range(begin, end, TILE):
        offsets = slot_offsets(table, tile_start, end, stride_block, HEAD_DIM, BLOCK_SIZE, TILE)
        tokens = tile_start + tl.arange(0, TILE)
        pointers = head_base + offsets[:, None] + dims[None, :]
        keys = load_slots(pointers, tokens, dims, end, HEAD_DIM, True)
        scores = scaled_log2(
            tl.dot(dot_operand(queries), tl.trans(dot_operand(keys)), input_precision="ieee"), scale, SOFT_CAP
        )
        visible = tokens < end
        if SLIDING_WINDOW > 0:
            visible &= tokens >= first_token
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        reference = finite_or_zero(new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(weights, 1)
        tile_values = load_slots(pointers + value_offset, tokens, dims, end, HEAD_DIM, True)
        values = values * decay[:, None]
        values += tl.dot(dot_operand(weights.to(tile_values.dtype)), dot_operand(tile_values), input_precision="ieee")
        maximum = new_maximum

    # A tile before the window's first token may be all hidden: total is then 0 and the split empty.
    values = values / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], values.to(out.dtype.element_ty), used)
    if lse is not None:
        log_sum = tl.where(total > 0.0, (maximum + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse + out_rows, log_sum, rows < GROUP)


def split_plan(max_tokens: int, sliding_window: int, tile: int) -> tuple[int, int]:
    """Return (tokens per split, number of splits) for sequences of at most `max_tokens`, `sliding_window` of them seen."""
    size = next((split for limit, split in SPLIT_TABLE if max_tokens <= limit), LONGEST_SPLIT)
    # The first split begins at a tile boundary, up to tile - 1 tokens before the window.
    seen = min(max_tokens, sliding_window + tile - 1) if sliding_window else max_tokens
    return size, max(1, -(-seen // size))


def tile_and_launch(head_dim: int, dtype: torch.dtype, arch: Arch) -> tuple[int, Launch]:
    """Return keys per tile and launch options."""
    if dtype is torch.float32:
        return 16, Launch(num_warps=4, num_stages=1 if arch is Arch.GFX942 else 2)
    if head_dim > 128:
        return 32, Launch(num_warps=4, num_stages=1 if arch is Arch.GFX942 else 2)
    stages = {Arch.SM80: 2, Arch.SM90: 3, Arch.SM100: 3, Arch.GFX942: 1}[arch]
    return 64, Launch(num_warps=4, num_stages=stages)


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
    batch, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    out = torch.empty(batch, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    tile, launch = tile_and_launch(head_dim, q.dtype, arch_of(q))
    split, num_splits = split_plan(block_tables.shape[1] * block_size, sliding_window, tile)
    partial_out, partial_lse = out, None
    if num_splits > 1:
        partial_out = torch.empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(batch, num_heads, num_splits, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    decode_kernel[(batch, num_kv_heads, num_splits)](
        partial_out,
        partial_lse,
        q,
        kv,
        block_tables,
        seq_lens,
        sinks,
        scale,
        q.stride(0),
        block_tables.stride(0),
        kv.stride(0),
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=triton.next_power_of_2(head_dim),
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        TILE=tile,
        SPLIT=split,
        SLIDING_WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **COMPILE_OPTIONS,
    )
    if partial_lse is None:
        return out
    merged, _ = merge_states(partial_out.view(-1, num_splits, head_dim), partial_lse.view(-1, num_splits), q.dtype)
    return merged.view(batch, num_heads, head_dim)


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    cases: list[tuple[int, int, int, torch.dtype, int, int, float, bool]] = [
        # head_dim, group, block_size, dtype, num_splits > 1, sliding_window, soft_cap, sinks
        (64, 3, 32, torch.bfloat16, 8, 0, 0.0, False),
        (128, 4, 32, torch.bfloat16, 8, 0, 0.0, False),
        (128, 8, 128, torch.bfloat16, 8, 0, 0.0, False),
        (128, 4, 16, torch.float16, 1, 0, 0.0, False),
        (96, 1, 64, torch.bfloat16, 8, 0, 0.0, False),
        (64, 8, 32, torch.bfloat16, 8, 128, 0.0, True),
        (256, 2, 32, torch.bfloat16, 8, 4096, 50.0, False),
        (128, 4, 32, torch.float32, 8, 0, 0.0, False),
    ]
    return [_variant(arch, *case) for case in cases]


def _variant(
    arch: Arch,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    num_splits: int,
    sliding_window: int,
    soft_cap: float,
    has_sinks: bool,
) -> Variant:
    tile, launch = tile_and_launch(head_dim, dtype, arch)
    name = TRITON_TYPES[dtype]
    is_split = num_splits > 1
    constants = {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": triton.next_power_of_2(head_dim),
        "ROWS": max(MIN_ROWS, triton.next_power_of_2(group)),
        "TILE": tile,
        "SPLIT": 512,
        "SLIDING_WINDOW": sliding_window,
        "SOFT_CAP": soft_cap,
    }
    types = {
        "out": "*fp32" if is_split else "*" + name,
        "lse": "*fp32",
        "q": "*" + name,
        "kv": "*" + name,
        "block_tables": "*i32",
        "seq_lens": "*i32",
        "sinks": "*fp32",
        "scale": "fp32",
        "stride_q": "i32",
        "stride_table": "i32",
        "stride_block": "i32",
    }
    if not is_split:
        constants["lse"] = None
    if not has_sinks:
        constants["sinks"] = None
    features = f"{' win' if sliding_window else ''}{' cap' if soft_cap else ''}{' sinks' if has_sinks else ''}"
    return Variant(
        kernel=decode_kernel,
        label=f"D{head_dim} G{group} S{block_size} {name}{features}",
        types={key: value for key, value in types.items() if key not in constants},
        constants=constants,
        launch=launch,
        unaligned=("stride_table",),
    )
