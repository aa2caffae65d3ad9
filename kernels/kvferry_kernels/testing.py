"""What kernel tests and tools need to compare implementations: odd shapes, tolerances, paged caches with poison in them.

Unused memory is filled with NaN, so that a kernel that reads past a length or leaves part of its output unwritten is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ODD_SIZES = (1, 2, 3, 7, 16, 33, 65, 127)
HEAD_DIMS = (16, 64, 80, 96, 128)
BLOCK_SIZES = (16, 32, 64, 128)
# Query heads and KV heads: groups of 1, 3, 4 and 8.
HEAD_COUNTS = ((2, 2), (9, 3), (8, 2), (8, 1))

# Largest accepted difference |actual - expected| <= absolute + relative * |expected| of one op against its fp32 reference.
_TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return the (absolute, relative) tolerance for outputs of `dtype` made from inputs of about unit size."""
    return _TOLERANCES[dtype]


def assert_close(
    actual: Tensor, expected: Tensor, *, absolute: float | None = None, relative: float | None = None
) -> None:
    """Raise AssertionError unless shapes and dtypes are equal and |actual - expected| <= absolute + relative * |expected|.

    Bounds default to `tolerance` of the dtype; NaN is close to nothing, an infinity to itself. Unlike
    `torch.testing.assert_close` this does not import half of torch, which takes seconds.
    """
    default_absolute, default_relative = tolerance(expected.dtype)
    absolute = default_absolute if absolute is None else absolute
    relative = default_relative if relative is None else relative
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} instead of {expected.dtype}"
    wanted, got = expected.double(), actual.double()
    excess = (got - wanted).abs() - (absolute + relative * wanted.abs())
    is_far = ~((excess <= 0) | (got == wanted))
    if is_far.any():
        index = tuple(is_far.nonzero()[0].tolist())
        count = f"{int(is_far.sum())} of {is_far.numel()} values differ"
        raise AssertionError(f"{count}, first at {index}: {got[index].item()} instead of {wanted[index].item()}")


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return a tensor of NaN (of the largest value for integer types), for outputs that must be written entirely."""
    return torch.full(shape, _poison(dtype), dtype=dtype, device=device)


def random_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers of `generator` rounded to `dtype`."""
    return torch.randn(shape, generator=generator).to(dtype)


@dataclass(kw_only=True)
class PagedCase:
    """A random attention problem: queries of several sequences over a shuffled, poisoned paged cache.

    `kv` [N, 2, KH, S, D] is NaN wherever no sequence has a token, `block_tables` [B, M] has zeros behind a sequence's
    blocks, and block 0 belongs to no sequence, so that a read through a padding entry meets NaN.
    """

    lengths: list[int]
    query_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    spare_columns: int = 1
    q: Tensor = field(init=False)
    kv: Tensor = field(init=False)
    block_tables: Tensor = field(init=False)
    query_starts: Tensor = field(init=False)
    seq_lens: Tensor = field(init=False)
    sinks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_blocks = [-(-length // self.block_size) for length in self.lengths]
        order = 1 + torch.randperm(sum(num_blocks), generator=generator)
        self.block_tables = torch.zeros(
            len(self.lengths), max([0, *num_blocks]) + self.spare_columns, dtype=torch.int32
        )
        shape = (sum(num_blocks) + 1, 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.kv = poisoned(*shape, dtype=self.dtype)
        taken = 0
        for row, (length, blocks) in enumerate(zip(self.lengths, num_blocks, strict=True)):
            table = order[taken : taken + blocks]
            taken += blocks
            self.block_tables[row, :blocks] = table
            for index, block in enumerate(table.tolist()):
                filled = min(self.block_size, length - index * self.block_size)
                self.kv[block, :, :, :filled] = random_tensor(
                    generator, 2, self.num_kv_heads, filled, self.head_dim, dtype=self.dtype
                )
        # Queries are a view of a wider tensor, as the merged qkv projection makes them.
        total, width = sum(self.query_lens), self.num_heads * self.head_dim
        merged = random_tensor(generator, total, width + 16, dtype=self.dtype)
        self.q = merged[:, :width].view(total, self.num_heads, self.head_dim)
        self.query_starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.sinks = random_tensor(generator, self.num_heads)

    @property
    def scale(self) -> float:
        """The usual 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    @property
    def max_query_len(self) -> int:
        """The longest run of queries, 0 without sequences."""
        return max(self.query_lens, default=0)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (the largest value for integers) inside the block."""
    allocate = torch.empty

    def poisoned_empty(*size: Any, **options: Any) -> Tensor:
        tensor = allocate(*size, **options)
        return tensor.fill_(_poison(tensor.dtype))

    with mock.patch.object(torch, "empty", poisoned_empty):
        yield


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
