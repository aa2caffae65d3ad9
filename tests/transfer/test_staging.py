"""A staging slot says what is in it: the payload meant, a taken-back one, or damage."""

from __future__ import annotations

import pytest
import torch

from kvferry_engine.transfer.commands import transfer_mark
from kvferry_engine.transfer.protocol.actions import Outcome
from kvferry_engine.transfer.staging import TRAILER_BYTES, CacheAccess, StagingPool, clear_trailer, seal, verify
from kvferry_kernels.staging import checksum

MARK = transfer_mark("d1:1.1")
NUM_BYTES = 2 * 2 * 2 * 16 * 4 * 4


def filled(num_slots: int = 2) -> tuple[StagingPool, torch.Tensor]:
    pool = StagingPool(num_slots=num_slots, slot_bytes=NUM_BYTES + 100, device=torch.device("cpu"))
    view = pool.view(1, NUM_BYTES)
    view[:NUM_BYTES] = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    seal(view, mark=MARK, pair_seq=5, sums=checksum(view[:NUM_BYTES]))
    return pool, view


def test_a_sealed_payload_is_ok() -> None:
    _, view = filled()

    assert verify(view, mark=MARK, pair_seq=5) is Outcome.OK


@pytest.mark.parametrize(("mark", "pair_seq"), [(MARK, 6), (transfer_mark("d1:1.2"), 5)])
def test_another_payload_is_corrupt(mark: int, pair_seq: int) -> None:
    _, view = filled()

    assert verify(view, mark=mark, pair_seq=pair_seq) is Outcome.CORRUPT


@pytest.mark.parametrize("position", [0, 7, NUM_BYTES // 2, NUM_BYTES - 1, NUM_BYTES + 20])
def test_every_bit_counts(position: int) -> None:
    _, view = filled()

    view[position] ^= 1

    assert verify(view, mark=MARK, pair_seq=5) is Outcome.CORRUPT


def test_swapped_words_are_corrupt() -> None:
    _, view = filled()
    words = view[:16].view(torch.int64)
    words[0], words[1] = int(words[1]), int(words[0])

    assert verify(view, mark=MARK, pair_seq=5) is Outcome.CORRUPT


def test_a_cleared_trailer_is_a_tombstone_whatever_the_slot_held_before() -> None:
    _, view = filled()

    clear_trailer(view)
    view[0] = 0

    assert verify(view, mark=MARK, pair_seq=5) is Outcome.TOMBSTONE


def test_slots_do_not_overlap_and_are_aligned() -> None:
    pool, view = filled(num_slots=3)
    before = view.clone()

    for slot in (0, 2):
        pool.view(slot, NUM_BYTES + 96).fill_(9)

    assert torch.equal(view, before)
    assert view.data_ptr() % 8 == 0
    assert view.numel() == NUM_BYTES + TRAILER_BYTES


def test_a_mark_is_never_what_a_cleared_trailer_holds() -> None:
    marks = {transfer_mark(f"d{n}:{n}.1") for n in range(1000)}

    assert len(marks) == 1000
    assert all(0 < mark < 1 << 63 for mark in marks)


def test_blocks_travel_through_a_slot() -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randn((3, 6, 2, 4, 16, 4), generator=generator)
    target = torch.zeros_like(source)
    pool = StagingPool(num_slots=1, slot_bytes=NUM_BYTES, device=torch.device("cpu"))
    view = pool.view(0, NUM_BYTES)
    away, home = torch.tensor([4], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)

    CacheAccess(source, NUM_BYTES).pack(view, away, layers=(1, 3), heads=(1, 3), mark=MARK, pair_seq=1)
    outcome = CacheAccess(target, NUM_BYTES).unpack(view, home, layers=(1, 3), heads=(1, 3), mark=MARK, pair_seq=1)

    assert outcome is Outcome.OK
    assert torch.equal(target[1:3, 2, :, 1:3], source[1:3, 4, :, 1:3])
    assert int((target != 0).sum()) == source[1:3, 4, :, 1:3].numel()


def test_a_damaged_payload_is_not_scattered() -> None:
    target = torch.zeros((3, 6, 2, 4, 16, 4))
    _, view = filled()
    view[100] ^= 8

    outcome = CacheAccess(target, NUM_BYTES).unpack(
        view, torch.tensor([2], dtype=torch.int32), layers=(1, 3), heads=(1, 3), mark=MARK, pair_seq=5
    )

    assert outcome is Outcome.CORRUPT
    assert not target.any()
