"""Prefill attention on the GPU: tiles of 64 or 128 query rows, tall enough for Hopper's and Blackwell's matrix instructions.

The query heads of one KV head are packed into the rows of a tile (row = query * group + head), so keys are read once per
group and short chunks still fill tiles. Keys every row sees are attended without masks; only the tiles at the window's
left edge and at the diagonal carry one.
"""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import (
    COMPILE_OPTIONS,
    LOG2_E,
    dot_operand,
    finite_or_zero,
    load_slots,
    scaled_log2,
    slot_offsets,
)
from kvferry_kernels.variants import TRITON_TYPES, Arch, Launch, Variant, arch_of


@triton.jit
def attend_tile(
    state,
    queries,
    positions,
    head_base,
    value_offset,
    table,
    tile_start,
    end,
    stride_block,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the softmax state (values [ROWS, D], total [ROWS], maximum [ROWS]) after TILE more keys.

    queries [ROWS, D] at key positions `positions` [ROWS]; head_base points to the head's keys of block 0, its values lie
    value_offset elements further. MASKED: some row may not see some key (behind it, or before its window).
    """
    values, total, maximum = state
    dims = tl.arange(0, queries.shape[1])
    keys_at = tile_start + tl.arange(0, TILE)
    pointers = (
        head_base
        + slot_offsets(table, tile_start, end, stride_block, HEAD_DIM, BLOCK_SIZE, TILE)[:, None]
        + dims[None, :]
    )
    keys = load_slots(pointers, keys_at, dims, end, HEAD_DIM, MASKED)
    scores = scaled_log2(
        tl.dot(dot_operand(queries), tl.trans(dot_operand(keys)), input_precision="ieee"), scale, SOFT_CAP
    )
    if MASKED:
        visible = keys_at[None, :] <= positions[:, None]
        if SLIDING_WINDOW > 0:
            visible &= keys_at[None, :] > positions[:, None] - SLIDING_WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    reference = finite_or_zero(new_maximum) if MASKED else new_maximum
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(maximum - reference)
    total = total * decay + tl.sum(weights, 1)
    tile_values = load_slots(pointers + value_offset, keys_at, dims, end, HEAD_DIM, MASKED)
    values = values * decay[:, None]
    values = tl.dot(
        dot_operand(weights.to(tile_values.dtype)), dot_operand(tile_values), acc=values, input_precision="ieee"
    )
    return values, total, new_maximum


@triton.jit
def prefill_kernel(
    out,
    q,
    kv,
    block_tables,
    query_starts,
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
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Attend with ROWS // GROUP queries of one sequence and one KV head's group; program (query tile, KV head, sequence).

    out [T, H, D]; q [T, H, D] with stride_q elements between tokens; kv [N, 2, KH, S, D] with stride_block elements between
    blocks; block_tables [B, M] int32 with stride_table between rows; query_starts [B + 1] int32; seq_lens [B] int32;
    sinks [H] fp32 or None. GROUP = H / KH; BLOCK_SIZE = S; HEAD_DIM = D, padded to a power of two; TILE keys at a time;
    SLIDING_WINDOW and SOFT_CAP: 0 = none. Query tiles run last first: those see the most keys.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first_query >= num_queries:
        return

    prefix = tl.load(seq_lens + sequence) - num_queries
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    queries_at = first_query + rows // GROUP
    positions = prefix + queries_at
    heads = kv_head * GROUP + rows % GROUP
    used = ((rows < QUERIES * GROUP) & (queries_at < num_queries))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_row + queries_at).to(tl.int64)
    queries = tl.load(q + (tokens * stride_q + heads * HEAD_DIM)[:, None] + dims[None, :], mask=used, other=0.0)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    values = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)

    # Keys: [start, window_end) masked at the left edge, [window_end, shared_end) seen by every row, [.., end) diagonal.
    last_position = prefix + tl.minimum(first_query + QUERIES, num_queries) - 1
    end = last_position + 1
    shared_end = (prefix + first_query + 1) // TILE * TILE
    window_end = 0
    start = 0
    if SLIDING_WINDOW > 0:
        start = tl.maximum(prefix + first_query - SLIDING_WINDOW + 1, 0) // TILE * TILE
        window_end = tl.cdiv(tl.maximum(last_position - SLIDING_WINDOW + 1, 0), TILE) * TILE
    table = block_tables + sequence.to(tl.int64) * stride_table
    head_base = kv + kv_head * BLOCK_SIZE * HEAD_DIM
    value_offset = num_kv_heads * BLOCK_SIZE * HEAD_DIM
    state = values, total, maximum
    if SLIDING_WINDOW > 0:
        for tile_start in tl.range(start, tl.minimum(window_end, end), TILE):
            state = attend_tile(
                state, queries, positions, head_base, value_offset, table, tile_start, end, stride_block, scale,
                BLOCK_SIZE, HEAD_DIM, TILE, SLIDING_WINDOW, SOFT_CAP, True,
            )  # fmt: skip
    for tile_start in tl.range(window_end, shared_end, TILE):
        state = attend_tile(
            state, queries, positions, head_base, value_offset, table, tile_start, end, stride_block, scale,
            BLOCK_SIZE, HEAD_DIM, TILE, SLIDING_WINDOW, SOFT_CAP, False,
        )  # fmt: skip
    for tile_start in tl.range(tl.maximum(window_end, shared_end), end, TILE):
        state = attend_tile(
            state, queries, positions, head_base, value_offset, table, tile_start, end, stride_block, scale,
            BLOCK_SIZE, HEAD_DIM, TILE, SLIDING_WINDOW, SOFT_CAP, True,
        )  # fmt: skip
    values, total, maximum = state
    values = values / total[:, None]
    out_offsets = (tokens * (num_kv_heads * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + out_offsets, values.to(out.dtype.element_ty), used)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows and keys of a tile, and launch options."""

    rows: int
    keys: int
    launch: Launch


# Per generation: (largest head_dim, tiles). Chosen by the compile gate: the largest tiles without spills that fit in shared
# memory; Hopper's matrix instruction needs 64 rows a warp group.
TILE_TABLE = {
    Arch.SM80: (
        (64, Tiles(128, 64, Launch(num_warps=8, num_stages=2))),
        (128, Tiles(128, 32, Launch(num_warps=8, num_stages=2))),
        (256, Tiles(64, 32, Launch(num_warps=8, num_stages=2))),
    ),
    Arch.SM90: (
        (128, Tiles(128, 64, Launch(num_warps=8, num_stages=3))),
        (256, Tiles(128, 32, Launch(num_warps=8, num_stages=2))),
    ),
    Arch.SM100: (
        (64, Tiles(128, 128, Launch(num_warps=8, num_stages=2))),
        (128, Tiles(128, 64, Launch(num_warps=8, num_stages=3))),
        (256, Tiles(64, 32, Launch(num_warps=4, num_stages=2))),
    ),
    Arch.GFX942: (
        (128, Tiles(128, 64, Launch(num_warps=8, num_stages=1))),
        (256, Tiles(64, 32, Launch(num_warps=4, num_stages=1))),
    ),
}
# fp32 has no matrix instruction at full precision; small tiles keep its operands in registers.
FP32_TILES = Tiles(32, 16, Launch(num_warps=4, num_stages=1))


def choose_tiles(head_dim: int, group: int, max_query_len: int, dtype: torch.dtype, arch: Arch) -> Tiles:
    """Return the tiles for runs of at most `max_query_len` queries, short ones getting 64 rows where the table has 128."""
    if dtype is torch.float32:
        tiles = FP32_TILES
    else:
        tiles = next(tiles for limit, tiles in TILE_TABLE[arch] if head_dim <= limit)
        if group * max_query_len <= 64 and head_dim <= 128:
            launch = Launch(num_warps=4, num_stages=tiles.launch.num_stages)
            tiles = Tiles(64, min(tiles.keys, 64), launch)
    return replace(tiles, rows=max(tiles.rows, triton.next_power_of_2(group)))


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See `varlen_attention.prefill_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    batch = seq_lens.shape[0]
    if batch == 0 or max_query_len == 0:
        return out
    group = num_heads // num_kv_heads
    tiles = choose_tiles(head_dim, group, max_query_len, q.dtype, arch_of(q))
    prefill_kernel[(triton.cdiv(max_query_len, tiles.rows // group), num_kv_heads, batch)](
        out,
        q,
        kv,
        block_tables,
        query_starts,
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
        ROWS=tiles.rows,
        TILE=tiles.keys,
        SLIDING_WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        num_warps=tiles.launch.num_warps,
        num_stages=tiles.launch.num_stages,
        **COMPILE_OPTIONS,
    )
    return out


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    cases: list[tuple[int, int, int, torch.dtype, int, int, float, bool]] = [
        # head_dim, group, block_size, dtype, longest query run, sliding_window, soft_cap, sinks
        (64, 3, 32, torch.bfloat16, 2048, 0, 0.0, False),
        (128, 4, 32, torch.bfloat16, 2048, 0, 0.0, False),
        (128, 4, 32, torch.bfloat16, 16, 0, 0.0, False),
        (128, 8, 128, torch.float16, 2048, 0, 0.0, False),
        (96, 1, 64, torch.bfloat16, 2048, 0, 0.0, False),
        (64, 8, 32, torch.bfloat16, 2048, 128, 0.0, True),
        (256, 2, 32, torch.bfloat16, 2048, 4096, 50.0, False),
        (80, 1, 16, torch.bfloat16, 2048, 0, 0.0, False),
        (128, 4, 32, torch.float32, 2048, 0, 0.0, False),
    ]
    return [_variant(arch, *case) for case in cases]


def _variant(
    arch: Arch,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    query_len: int,
    sliding_window: int,
    soft_cap: float,
    has_sinks: bool,
) -> Variant:
    tiles = choose_tiles(head_dim, group, query_len, dtype, arch)
    name = TRITON_TYPES[dtype]
    constants = {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": triton.next_power_of_2(head_dim),
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "SLIDING_WINDOW": sliding_window,
        "SOFT_CAP": soft_cap,
    }
    types = {
        "out": "*" + name,
        "q": "*" + name,
        "kv": "*" + name,
        "block_tables": "*i32",
        "query_starts": "*i32",
        "seq_lens": "*i32",
        "sinks": "*fp32",
        "scale": "fp32",
        "stride_q": "i32",
        "stride_table": "i32",
        "stride_block": "i32",
    }
    if not has_sinks:
        constants["sinks"] = None
        del types["sinks"]
    features = f"{' win' if sliding_window else ''}{' cap' if soft_cap else ''}{' sinks' if has_sinks else ''}"
    return Variant(
        kernel=prefill_kernel,
        label=f"M{tiles.rows} D{head_dim} G{group} S{block_size} {name}{features}",
        types=types,
        constants=constants,
        launch=tiles.launch,
        unaligned=("stride_table",),
        expect_wgmma=dtype is not torch.float32,
    )
