"""Staging on CPUs: one `index_select` or `index_copy_` over rows of one head, straight between cache and payload."""

from __future__ import annotations

import torch
from torch import Tensor

# Words per row of the weighted sum: its weights 1..n stay in the first-level cache.
CHECKSUM_ROW = 1024


def gather_blocks(storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], out: Tensor) -> int:
    """See `staging.gather_blocks`."""
    rows, row_elements = _rows(storage, blocks, layers, heads)
    num_bytes = rows.numel() * row_elements * storage.element_size()
    payload = out[:num_bytes].view(storage.dtype).view(-1, row_elements)
    torch.index_select(storage.view(-1, row_elements), 0, rows, out=payload)
    return num_bytes


def gather_blocks_checksum(
    storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], out: Tensor
) -> tuple[int, tuple[int, int]]:
    """See `staging.gather_blocks_checksum`."""
    num_bytes = gather_blocks(storage, blocks, layers, heads, out)
    return num_bytes, checksum(out[:num_bytes])


def scatter_blocks(
    payload: Tensor, storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    """See `staging.scatter_blocks`."""
    rows, row_elements = _rows(storage, blocks, layers, heads)
    num_bytes = rows.numel() * row_elements * storage.element_size()
    values = payload[:num_bytes].view(storage.dtype).view(-1, row_elements)
    storage.view(-1, row_elements).index_copy_(0, rows, values)


def scatter_blocks_checksum(
    payload: Tensor, storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]
) -> tuple[int, int]:
    """See `staging.scatter_blocks_checksum`."""
    scatter_blocks(payload, storage, blocks, layers, heads)
    rows, row_elements = _rows(storage, blocks, layers, heads)
    return checksum(payload[: rows.numel() * row_elements * storage.element_size()])


def checksum(payload: Tensor) -> tuple[int, int]:
    """See `staging.checksum`."""
    missing = -payload.numel() % 8
    if missing:
        payload = torch.nn.functional.pad(payload, (0, missing))
    words = payload.view(torch.int64)
    num_rows = words.numel() // CHECKSUM_ROW
    body, tail = words[: num_rows * CHECKSUM_ROW].view(num_rows, CHECKSUM_ROW), words[num_rows * CHECKSUM_ROW :]
    weights = torch.arange(1, CHECKSUM_ROW + 1)
    row_sums, row_starts = body.sum(1), torch.arange(num_rows) * CHECKSUM_ROW
    weighted = torch.mv(body, weights).sum() + (row_sums * row_starts).sum()
    weighted += (tail * (weights[: tail.numel()] + num_rows * CHECKSUM_ROW)).sum()
    return int(row_sums.sum() + tail.sum()), int(weighted)


def _rows(storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]) -> tuple[Tensor, int]:
    """Return the row numbers, in payload order, of storage seen as [L * N * 2 * KH, S * D], and S * D."""
    _, num_blocks, _, num_kv_heads, block_size, head_dim = storage.shape
    planes = torch.arange(*layers).view(-1, 1, 1) * num_blocks + blocks.long().view(1, -1, 1)
    sides = planes * 2 + torch.arange(2)
    rows = sides[..., None] * num_kv_heads + torch.arange(*heads)
    return rows.view(-1), block_size * head_dim
