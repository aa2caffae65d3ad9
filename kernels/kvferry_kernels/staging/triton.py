"""Staging on the GPU: one pass copies a run of heads, as 8-byte words, and sums what it copied."""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import COMPILE_OPTIONS
from kvferry_kernels.variants import Arch, Launch, Variant

TILE = 1024
WORD_BYTES = 8
LAUNCH = Launch(num_warps=4, num_stages=1)


@triton.jit
def copy_kernel(
    payload,
    storage,
    blocks,
    sums,
    first_layer,
    num_blocks,
    first_word,
    head_words,
    side_words,
    storage_blocks,
    TO_STORAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy TILE words of one run between cache and payload; program (run, word tile), runs in the order [layer][block][2].

    payload [runs, head_words] int64; storage [L, storage_blocks, 2, side_words] int64; blocks [num_blocks] int32; sums [2]
    int64, zeroed, or None for no checksum. A run is the head range, words first_word .. first_word + head_words of a side.
    TO_STORAGE: scatter, else gather.
    """
    run = tl.program_id(0).to(tl.int64)
    side = run % 2
    block = tl.load(blocks + run // 2 % num_blocks).to(tl.int64)
    layer = first_layer + run // 2 // num_blocks
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = words < head_words
    in_storage = storage + ((layer * storage_blocks + block) * 2 + side) * side_words + first_word + words
    in_payload = payload + run * head_words + words
    if TO_STORAGE:
        values = tl.load(in_payload, mask, other=0)
        tl.store(in_storage, values, mask)
    else:
        values = tl.load(in_storage, mask, other=0)
        tl.store(in_payload, values, mask)
    if sums is not None:
        tl.atomic_add(sums, tl.sum(values, 0))
        tl.atomic_add(sums + 1, tl.sum(values * (run * head_words + words + 1), 0))


@triton.jit
def checksum_kernel(payload, sums, num_words, TILE: tl.constexpr):
    """Add the sums of TILE words; program (word tile). payload [num_words] int64; sums [2] int64, zeroed."""
    words = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(payload + words, words < num_words, other=0)
    tl.atomic_add(sums, tl.sum(values, 0))
    tl.atomic_add(sums + 1, tl.sum(values * (words + 1), 0))


def gather_blocks(storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], out: Tensor) -> int:
    """See `staging.gather_blocks`."""
    return _copy(out, storage, blocks, layers, heads, None, to_storage=False)


def gather_blocks_checksum(
    storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], out: Tensor
) -> tuple[int, tuple[int, int]]:
    """See `staging.gather_blocks_checksum`."""
    sums = _zero_sums(storage)
    return _copy(out, storage, blocks, layers, heads, sums, to_storage=False), _read(sums)


def scatter_blocks(
    payload: Tensor, storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    """See `staging.scatter_blocks`."""
    _copy(payload, storage, blocks, layers, heads, None, to_storage=True)


def scatter_blocks_checksum(
    payload: Tensor, storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]
) -> tuple[int, int]:
    """See `staging.scatter_blocks_checksum`."""
    sums = _zero_sums(storage)
    _copy(payload, storage, blocks, layers, heads, sums, to_storage=True)
    return _read(sums)


def checksum(payload: Tensor) -> tuple[int, int]:
    """See `staging.checksum`."""
    sums = _zero_sums(payload)
    missing = -payload.numel() % WORD_BYTES
    if missing:
        payload = torch.nn.functional.pad(payload, (0, missing))
    words = payload.view(torch.int64)
    if words.numel():
        checksum_kernel[(triton.cdiv(words.numel(), TILE),)](
            words,
            sums,
            words.numel(),
            TILE=TILE,
            num_warps=LAUNCH.num_warps,
            num_stages=LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )
    return _read(sums)


def _zero_sums(tensor: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=tensor.device)


def _read(sums: Tensor) -> tuple[int, int]:
    first, second = sums.tolist()
    return first, second


def _copy(
    payload: Tensor,
    storage: Tensor,
    blocks: Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    sums: Tensor | None,
    *,
    to_storage: bool,
) -> int:
    """Launch the copy and return the payload's bytes."""
    _, storage_blocks, _, num_kv_heads, block_size, head_dim = storage.shape
    # A head's part of a block holds at least 16 slots of 16 dims, a multiple of 8 bytes in every dtype.
    words_per_head = block_size * head_dim * storage.element_size() // WORD_BYTES
    head_words = (heads[1] - heads[0]) * words_per_head
    num_runs = (layers[1] - layers[0]) * blocks.numel() * 2
    num_bytes = num_runs * head_words * WORD_BYTES
    if num_bytes:
        copy_kernel[(num_runs, triton.cdiv(head_words, TILE))](
            payload[:num_bytes].view(torch.int64),
            storage.view(-1).view(torch.int64),
            blocks,
            sums,
            layers[0],
            blocks.numel(),
            heads[0] * words_per_head,
            head_words,
            num_kv_heads * words_per_head,
            storage_blocks,
            TO_STORAGE=to_storage,
            TILE=TILE,
            num_warps=LAUNCH.num_warps,
            num_stages=LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )
    return num_bytes


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    counts = ("first_layer", "num_blocks", "first_word", "head_words", "side_words", "storage_blocks")
    pointers = {"payload": "*i64", "storage": "*i64", "blocks": "*i32", "sums": "*i64"}
    variants = [
        Variant(
            kernel=copy_kernel,
            label=f"{'scatter' if to_storage else 'gather'} checksum",
            types=pointers | dict.fromkeys(counts, "i32"),
            constants={"TO_STORAGE": to_storage, "TILE": TILE},
            launch=LAUNCH,
            unaligned=("first_layer", "num_blocks", "storage_blocks"),
        )
        for to_storage in (False, True)
    ]
    plain = Variant(
        kernel=copy_kernel,
        label="gather",
        types={name: kind for name, kind in variants[0].types.items() if name != "sums"},
        constants={"TO_STORAGE": False, "TILE": TILE, "sums": None},
        launch=LAUNCH,
        unaligned=variants[0].unaligned,
    )
    checksum_variant = Variant(
        kernel=checksum_kernel,
        label="checksum",
        types={"payload": "*i64", "sums": "*i64", "num_words": "i32"},
        constants={"TILE": TILE},
        launch=LAUNCH,
        unaligned=("num_words",),
    )
    return [*variants, plain, checksum_variant]
