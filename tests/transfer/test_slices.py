"""Every head of every receiver rank comes from exactly one sender rank, and chunks tile what is to be sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_engine.transfer.protocol.slices import (
    ChunkRange,
    Cursor,
    Stream,
    chunk_bytes,
    chunk_shape,
    fit_streams,
    heads_of_rank,
    make_streams,
)
from kvferry_engine.wire.messages import KVLayout


def layout(*, heads: int = 4, layers: int = 3) -> KVLayout:
    return KVLayout(num_layers=layers, num_kv_heads=heads, head_dim=8, block_size=16, dtype="bfloat16")


def divides(ranks: int, heads: int) -> bool:
    return heads % ranks == 0 if ranks <= heads else ranks % heads == 0


sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8)).filter(
    lambda size: divides(size[0], size[2]) and divides(size[1], size[2])
)


@given(sizes)
def test_streams_cover_every_head_of_every_receiver_once(size: tuple[int, int, int]) -> None:
    p_ranks, d_ranks, heads = size

    streams = make_streams(p_ranks, d_ranks, heads)

    covered = [(s.d_rank, head) for s in streams for head in range(s.head_start, s.head_stop)]
    wanted = [(rank, head) for rank in range(d_ranks) for head in range(*heads_of_rank(rank, d_ranks, heads))]
    assert sorted(covered) == sorted(wanted)
    for stream in streams:
        first, last = heads_of_rank(stream.p_rank, p_ranks, heads)
        assert first <= stream.head_start < stream.head_stop <= last


def test_replicated_heads_are_sent_by_different_ranks() -> None:
    assert {stream.p_rank for stream in make_streams(4, 4, 2)} == {0, 1, 2, 3}


def test_three_heads_on_three_ranks_gather_on_one() -> None:
    assert make_streams(3, 1, 3) == [Stream(0, 0, 0, 1), Stream(1, 0, 1, 2), Stream(2, 0, 2, 3)]


@pytest.mark.parametrize(("ranks", "heads"), [(2, 3), (4, 6), (5, 2)])
def test_indivisible_heads_are_refused(ranks: int, heads: int) -> None:
    with pytest.raises(ValueError, match=str(heads)):
        make_streams(ranks, 1, heads)


def test_a_slot_below_one_head_of_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="staging-slot-bytes"):
        fit_streams(make_streams(1, 1, 4), layout(), 511)


@given(
    slot_bytes=st.integers(512, 40_000),
    have=st.integers(0, 3),
    steps=st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_chunks_fit_slots_and_tile_blocks_and_layers_in_order(slot_bytes: int, have: int, steps: list[int]) -> None:
    kv = layout()
    for stream in fit_streams(make_streams(1, 2, 4), kv, slot_bytes):
        shape = chunk_shape(stream, kv, slot_bytes)
        sender, receiver = Cursor(have, kv.num_layers), Cursor(have, kv.num_layers)
        ready, seen = have, []
        for step in steps:
            ready += step
            while (piece := sender.next_range(ready, shape)) is not None:
                assert chunk_bytes(stream, piece, kv) <= slot_bytes
                assert receiver.accepts(piece)
                sender.advance(piece)
                receiver.advance(piece)
                seen += [
                    (block, layer)
                    for block in range(piece.block_start, piece.block_stop)
                    for layer in range(piece.layer_start, piece.layer_stop)
                ]
        assert sorted(seen) == [(block, layer) for block in range(have, ready) for layer in range(kv.num_layers)]
        assert len(seen) == len(set(seen))
        assert receiver.next_block == ready


@pytest.mark.parametrize(
    "piece",
    [
        ChunkRange(3, 4, 0, 3),
        ChunkRange(2, 2, 0, 3),
        ChunkRange(2, 3, 1, 3),
        ChunkRange(2, 3, 0, 4),
        ChunkRange(2, 3, 1, 1),
        ChunkRange(1, 3, 0, 3),
    ],
)
def test_a_receiver_accepts_nothing_out_of_order(piece: ChunkRange) -> None:
    assert not Cursor(2, 3).accepts(piece)
