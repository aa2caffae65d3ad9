"""Which part of the KV cache travels between which ranks, and in what pieces: the arithmetic both ends must agree on.

A *stream* is everything one sender rank sends one receiver rank for one head range; its chunks go in (block, layer) order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.wire.messages import KVLayout

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """One sender rank, one receiver rank, one half-open range of the model's KV heads."""

    p_rank: int
    d_rank: int
    head_start: int
    head_stop: int

    @property
    def key(self) -> tuple[int, int, int]:
        """What the receiver tracks completion by: (receiver rank, head range)."""
        return (self.d_rank, self.head_start, self.head_stop)


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Largest chunk of a stream: several blocks of all layers, or one block of some layers."""

    num_blocks: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Half-open block and layer ranges of one chunk; blocks count from the prompt's start."""

    block_start: int
    block_stop: int
    layer_start: int
    layer_stop: int


def heads_of_rank(rank: int, tensor_parallel: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the half-open range of KV heads a rank holds; heads are replicated when ranks outnumber them.

    Raises ValueError when heads and ranks do not divide.
    """
    if tensor_parallel <= num_kv_heads:
        if num_kv_heads % tensor_parallel:
            raise ValueError(f"{num_kv_heads} KV heads do not divide over {tensor_parallel} ranks")
        share = num_kv_heads // tensor_parallel
        return rank * share, (rank + 1) * share
    if tensor_parallel % num_kv_heads:
        raise ValueError(f"{tensor_parallel} ranks are no multiple of {num_kv_heads} KV heads")
    head = rank // (tensor_parallel // num_kv_heads)
    return head, head + 1


def make_streams(sender_ranks: int, receiver_ranks: int, num_kv_heads: int) -> list[Stream]:
    """Return the streams that fill every head of every receiver rank exactly once, in a fixed order.

    Where several sender ranks hold the same head, receiver ranks are spread over them. Raises ValueError as `heads_of_rank`.
    """
    replicas = max(1, sender_ranks // num_kv_heads)
    holders = [heads_of_rank(rank, sender_ranks, num_kv_heads) for rank in range(sender_ranks)]
    streams: list[Stream] = []
    for d_rank in range(receiver_ranks):
        start, stop = heads_of_rank(d_rank, receiver_ranks, num_kv_heads)
        for head in range(start, stop):
            owners = [rank for rank, (first, last) in enumerate(holders) if first <= head < last]
            p_rank = owners[d_rank % replicas]
            last = streams[-1] if streams else None
            if last is not None and (last.p_rank, last.d_rank, last.head_stop) == (p_rank, d_rank, head):
                streams[-1] = Stream(p_rank, d_rank, last.head_start, head + 1)
            else:
                streams.append(Stream(p_rank, d_rank, head, head + 1))
    return streams


def head_layer_bytes(layout: KVLayout) -> int:
    """Bytes of K and V of one block, one layer and one head: the smallest piece that can travel."""
    return 2 * layout.block_size * layout.head_dim * DTYPE_BYTES[layout.dtype]


def fit_streams(streams: list[Stream], layout: KVLayout, slot_bytes: int) -> list[Stream]:
    """Split streams by heads until one block of one layer fits a staging slot.

    Raises ValueError when not even one head of one layer of one block does.
    """
    most_heads = slot_bytes // head_layer_bytes(layout)
    if most_heads == 0:
        raise ValueError(
            f"a staging slot of {slot_bytes} bytes holds less than one head of one block ({head_layer_bytes(layout)} bytes);"
            " raise --staging-slot-bytes"
        )
    return [
        Stream(stream.p_rank, stream.d_rank, start, min(start + most_heads, stream.head_stop))
        for stream in streams
        for start in range(stream.head_start, stream.head_stop, most_heads)
    ]


def chunk_shape(stream: Stream, layout: KVLayout, slot_bytes: int) -> ChunkShape:
    """Return the largest chunk of a stream (from `fit_streams`) that fits a slot."""
    block_layer_bytes = (stream.head_stop - stream.head_start) * head_layer_bytes(layout)
    if block_layer_bytes * layout.num_layers <= slot_bytes:
        return ChunkShape(slot_bytes // (block_layer_bytes * layout.num_layers), layout.num_layers)
    return ChunkShape(1, slot_bytes // block_layer_bytes)


def chunk_bytes(stream: Stream, piece: ChunkRange, layout: KVLayout) -> int:
    """Payload bytes of a chunk, without the trailer."""
    num_heads = stream.head_stop - stream.head_start
    num_block_layers = (piece.block_stop - piece.block_start) * (piece.layer_stop - piece.layer_start)
    return num_block_layers * num_heads * head_layer_bytes(layout)


class Cursor:
    """How far a stream has come. `next_block` blocks are complete in all layers; within a group of blocks layers go in order."""

    def __init__(self, first_block: int, num_layers: int) -> None:
        self.next_block = first_block
        self._num_layers = num_layers
        self._next_layer = 0
        self._group_stop = first_block

    def next_range(self, ready_blocks: int, shape: ChunkShape) -> ChunkRange | None:
        """The chunk to send next when `ready_blocks` leading blocks of the prompt are there, or None."""
        if self._next_layer:
            stop = self._group_stop
        else:
            stop = min(ready_blocks, self.next_block + shape.num_blocks)
        if stop <= self.next_block or stop > ready_blocks:
            return None
        return ChunkRange(
            self.next_block, stop, self._next_layer, min(self._num_layers, self._next_layer + shape.num_layers)
        )

    def accepts(self, piece: ChunkRange) -> bool:
        """Whether `piece` is the next one in order."""
        if piece.block_start != self.next_block or piece.block_stop <= piece.block_start:
            return False
        if piece.layer_start != self._next_layer or not piece.layer_start < piece.layer_stop <= self._num_layers:
            return False
        return self._next_layer == 0 or piece.block_stop == self._group_stop

    def advance(self, piece: ChunkRange) -> None:
        """Step over an accepted piece."""
        assert self.accepts(piece)
        self._group_stop = piece.block_stop
        self._next_layer = piece.layer_stop
        if self._next_layer == self._num_layers:
            self.next_block = piece.block_stop
            self._next_layer = 0
