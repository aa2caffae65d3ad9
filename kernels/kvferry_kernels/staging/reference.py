"""Staging as the layout says it: index the storage, look at the bytes, sum the words as Python integers."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks(storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], out: Tensor) -> int:
    """See `staging.gather_blocks`."""
    selected = storage[layers[0] : layers[1], blocks.long()][:, :, :, heads[0] : heads[1]]
    payload = selected.contiguous().view(-1).view(torch.uint8)
    out[: payload.numel()] = payload
    return payload.numel()


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
    shape = (layers[1] - layers[0], blocks.numel(), 2, heads[1] - heads[0], *storage.shape[4:])
    num_bytes = torch.Size(shape).numel() * storage.element_size()
    values = payload[:num_bytes].view(storage.dtype).view(shape)
    for index, block in enumerate(blocks.tolist()):
        storage[layers[0] : layers[1], block, :, heads[0] : heads[1]] = values[:, index]


def scatter_blocks_checksum(
    payload: Tensor, storage: Tensor, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int]
) -> tuple[int, int]:
    """See `staging.scatter_blocks_checksum`."""
    scatter_blocks(payload, storage, blocks, layers, heads)
    block_bytes = 2 * storage.shape[4] * storage.shape[5] * storage.element_size()
    return checksum(payload[: (layers[1] - layers[0]) * blocks.numel() * (heads[1] - heads[0]) * block_bytes])


def checksum(payload: Tensor) -> tuple[int, int]:
    """See `staging.checksum`."""
    data = bytes(payload.tolist())
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    return _wrapped(sum(words)), _wrapped(sum(word * (index + 1) for index, word in enumerate(words)))


def _wrapped(value: int) -> int:
    """Return value modulo 2**64 as a signed 64-bit number."""
    return (value + 2**63) % 2**64 - 2**63
