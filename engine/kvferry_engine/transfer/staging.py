"""Staging slots, the only memory the wire may touch, and the trailer that proves what is in one.

A payload ends with a trailer of four int64 words: transfer mark, pair_seq and two checksum words. The receiver clears the trailer
before it posts a receive, so a payload that was taken back (tombstone: a shorter send) leaves zeros, and one that was damaged
or belongs elsewhere shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvferry_engine.transfer.protocol.actions import Outcome
from kvferry_kernels.staging import checksum, gather_blocks_checksum, scatter_blocks

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


def clear_trailer(view: Tensor) -> None:
    """Prepare a slot's view for a receive."""
    view[-TRAILER_BYTES:].zero_()


def seal(view: Tensor, *, mark: int, pair_seq: int, sums: tuple[int, int]) -> None:
    """Write the trailer behind a gathered payload whose checksum is `sums`."""
    words = torch.tensor([mark, pair_seq, *sums], dtype=torch.int64)
    view[-TRAILER_BYTES:].copy_(words.view(torch.uint8))


def verify(view: Tensor, *, mark: int, pair_seq: int) -> Outcome:
    """Say what a received view holds: OK, TOMBSTONE or CORRUPT."""
    words = view[-TRAILER_BYTES:].cpu().clone().view(torch.int64).tolist()
    if not any(words):
        return Outcome.TOMBSTONE
    if words[0] != mark or words[1] != pair_seq or tuple(words[2:]) != checksum(view[:-TRAILER_BYTES]):
        return Outcome.CORRUPT
    return Outcome.OK


class CacheAccess:
    """Moves blocks between the rank's KV storage and staging views, checksums included.

    storage: [num_layers, num_blocks, 2, kv_heads_of_rank, block_size, head_dim]. On a GPU everything runs on a stream of its own,
    so that it does not wait for the step in flight, and is complete when a method returns; host views go through one
    device buffer of a slot's size.
    """

    def __init__(self, storage: Tensor, slot_bytes: int) -> None:
        self._storage = storage
        self._stream: torch.cuda.Stream | None = None
        self._bounce: Tensor | None = None
        if storage.is_cuda:
            self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._bounce = torch.empty(slot_bytes, dtype=torch.uint8, device=storage.device)

    def clear(self, view: Tensor) -> None:
        """Prepare a view for a receive."""
        with self._on_stream():
            clear_trailer(view)

    def pack(
        self, view: Tensor, blocks: Tensor, *, layers: tuple[int, int], heads: tuple[int, int], mark: int, pair_seq: int
    ) -> None:
        """Copy blocks (int32 [n], CPU) into a view, order [layer][block][2][head][slot][dim], and add the trailer."""
        payload = view[:-TRAILER_BYTES]
        with self._on_stream():
            buffer = self._beside_storage(payload)
            _, sums = gather_blocks_checksum(self._storage, blocks.to(buffer.device), layers, heads, buffer)
            if buffer is not payload:
                payload.copy_(buffer)
            seal(view, mark=mark, pair_seq=pair_seq, sums=sums)

    def unpack(
        self, view: Tensor, blocks: Tensor, *, layers: tuple[int, int], heads: tuple[int, int], mark: int, pair_seq: int
    ) -> Outcome:
        """Verify a received view and, only if it is what was announced, copy it into blocks (int32 [n], CPU)."""
        payload = view[:-TRAILER_BYTES]
        with self._on_stream():
            outcome = verify(view, mark=mark, pair_seq=pair_seq)
            if outcome is Outcome.OK:
                buffer = self._beside_storage(payload)
                if buffer is not payload:
                    buffer.copy_(payload)
                scatter_blocks(buffer, self._storage, blocks.to(buffer.device), layers, heads)
        return outcome

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _beside_storage(self, payload: Tensor) -> Tensor:
        if self._bounce is None or payload.is_cuda:
            return payload
        return self._bounce[: payload.numel()]
