"""Staging slots, the only memory the wire may touch, and the trailer that proves what is in one.

A payload ends with a trailer of four int64 words: transfer mark, pair_seq and two checksum words. The receiver clears the trailer
before it posts a receive, so a payload that was taken back (tombstone: a shorter send) leaves zeros, and one that was damaged
or belongs elsewhere shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_engine.transfer.protocol.actions import Outcome
from kvferry_kernels.staging import checksum, gather_blocks, scatter_blocks

TRAILER_BYTES = 32
TOMBSTONE_BYTES = 1
ALIGNMENT_BYTES = 64


class StagingPool:
    """`num_slots` equal slots in one uint8 tensor (pinned when the cache is on a GPU and the wire on the host)."""

    def __init__(self, *, num_slots: int, slot_bytes: int, device: torch.device, is_pinned: bool = False) -> None:
        stride = -(-(slot_bytes + TRAILER_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.slot_bytes = slot_bytes
        self._memory = torch.zeros((num_slots, stride), dtype=torch.uint8, device=device, pin_memory=is_pinned)

    def view(self, slot: int, num_bytes: int) -> Tensor:
        """Payload of `num_bytes` and its trailer. uint8 [num_bytes + TRAILER_BYTES], contiguous."""
        assert num_bytes <= self.slot_bytes
        return self._memory[slot, : num_bytes + TRAILER_BYTES]


def _trailer(payload: Tensor) -> Tensor:
    return payload[-TRAILER_BYTES:]


def clear_trailer(payload: Tensor) -> None:
    """Prepare a slot's view for a receive."""
    _trailer(payload).zero_()


def seal(payload: Tensor, *, mark: int, pair_seq: int) -> None:
    """Write the trailer of a gathered payload (view with trailer)."""
    words = torch.tensor([mark, pair_seq, *checksum(payload[:-TRAILER_BYTES])], dtype=torch.int64)
    _trailer(payload).copy_(words.view(torch.uint8))


def verify(payload: Tensor, *, mark: int, pair_seq: int) -> Outcome:
    """Say what a received view holds: OK, TOMBSTONE or CORRUPT."""
    words = _trailer(payload).cpu().clone().view(torch.int64).tolist()
    if not any(words):
        return Outcome.TOMBSTONE
    if words[0] != mark or words[1] != pair_seq or tuple(words[2:]) != tuple(checksum(payload[:-TRAILER_BYTES])):
        return Outcome.CORRUPT
    return Outcome.OK


class CacheAccess:
    """Copies between the rank's KV storage and staging views; host staging of a GPU cache goes through one device buffer.

    storage: [num_layers, num_blocks, 2, kv_heads_of_rank, block_size, head_dim]. On a GPU the copies run on their own stream,
    so that they do not wait for the step that is in flight, and are complete when the method returns.
    """

    def __init__(self, storage: Tensor, slot_bytes: int) -> None:
        self.storage = storage
        self._is_cuda = storage.is_cuda
        self._stream = torch.cuda.Stream(storage.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._bounce = torch.empty(slot_bytes, dtype=torch.uint8, device=storage.device) if self._is_cuda else None

    def gather(self, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], payload: Tensor) -> None:
        """Copy blocks (int32 [n], CPU) into `payload` (view without trailer), order [layer][block][2][head][slot][dim]."""
        if self._stream is None:
            gather_blocks(self.storage, blocks, layers=layers, heads=heads, out=payload)
            return
        with torch.cuda.stream(self._stream):
            target = self._on_device(payload)
            gather_blocks(self.storage, blocks.to(self.storage.device), layers=layers, heads=heads, out=target)
            if target is not payload:
                payload.copy_(target, non_blocking=True)
        self._stream.synchronize()

    def scatter(self, blocks: Tensor, layers: tuple[int, int], heads: tuple[int, int], payload: Tensor) -> None:
        """Inverse of `gather`."""
        if self._stream is None:
            scatter_blocks(payload, self.storage, blocks, layers=layers, heads=heads)
            return
        with torch.cuda.stream(self._stream):
            source = self._on_device(payload)
            if source is not payload:
                source.copy_(payload, non_blocking=True)
            scatter_blocks(source, self.storage, blocks.to(self.storage.device), layers=layers, heads=heads)
        self._stream.synchronize()

    def _on_device(self, payload: Tensor) -> Tensor:
        if payload.is_cuda:
            return payload
        assert self._bounce is not None
        return self._bounce[: payload.numel()]
