"""The ledger of blocks: who holds what, what may be reused, in which order."""

from __future__ import annotations

import pytest

from kvferry_engine.kv_cache.block_pool import BlockPool, Owner

A, B, TRANSFER = 1, 2, 900


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def pool_with_cached(num_blocks: int, evicted: list[bytes] | None = None) -> tuple[BlockPool, list[int]]:
    """A pool whose blocks are all cached, hash_of(i) for the i-th of the prompt."""
    pool = BlockPool(num_blocks, 4, on_evict=None if evicted is None else evicted.append)
    blocks = pool.allocate(num_blocks, Owner.SEQUENCE, A)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.set_hash(block, hash_of(number))
    pool.release(blocks, A)
    return pool, blocks


def test_allocation_gives_all_or_nothing() -> None:
    pool = BlockPool(3, 4)

    assert pool.allocate(4, Owner.SEQUENCE, A) is None
    assert pool.num_free == 3
    assert len(set(pool.allocate(3, Owner.SEQUENCE, A) or [])) == 3
    assert pool.num_free == 0


def test_a_block_is_free_when_its_last_holder_is_gone() -> None:
    pool, blocks = pool_with_cached(2)
    pool.take(blocks, Owner.SEQUENCE, A)
    pool.take(blocks, Owner.SEQUENCE, B)

    pool.release(blocks, A)
    assert pool.num_free == 0
    pool.release(blocks, B)

    assert pool.num_free == 2
    assert pool.check() == []


def test_deep_blocks_are_evicted_before_their_parents_and_old_prefixes_before_new_ones() -> None:
    evicted: list[bytes] = []
    pool, blocks = pool_with_cached(4, evicted)
    pool.take(blocks[:2], Owner.SEQUENCE, B)
    pool.release(blocks[:2], B)

    pool.allocate(4, Owner.SEQUENCE, B)

    assert evicted == [hash_of(3), hash_of(2), hash_of(1), hash_of(0)]
    assert not pool.has_hash.any()


def test_held_blocks_are_never_evicted() -> None:
    evicted: list[bytes] = []
    pool, blocks = pool_with_cached(3, evicted)
    pool.take(blocks[2:], Owner.SEND_PIN, TRANSFER)

    assert pool.allocate(3, Owner.SEQUENCE, B) is None
    assert set(pool.allocate(2, Owner.SEQUENCE, B) or []) == set(blocks[:2])
    assert evicted == [hash_of(1), hash_of(0)]


def test_free_blocks_are_used_before_cached_ones() -> None:
    evicted: list[bytes] = []
    pool = BlockPool(2, 4, on_evict=evicted.append)
    (first,) = pool.allocate(1, Owner.SEQUENCE, A) or []
    pool.set_hash(first, hash_of(1))
    pool.release([first], A)

    assert pool.allocate(1, Owner.SEQUENCE, A) != [first]
    assert evicted == []


def test_a_fenced_block_is_reused_only_after_its_step_retired() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2, Owner.SEQUENCE, A) or []

    pool.release(blocks, A, fence=7)
    assert (pool.num_free, pool.num_fenced) == (0, 2)
    pool.retired(6)
    assert pool.allocate(1, Owner.SEQUENCE, B) is None
    pool.retired(7)

    assert (pool.num_free, pool.num_fenced) == (2, 0)
    assert pool.check() == []


def test_a_fence_that_has_retired_already_does_not_hold() -> None:
    pool = BlockPool(1, 4)
    blocks = pool.allocate(1, Owner.SEQUENCE, A) or []
    pool.retired(3)

    pool.release(blocks, A, fence=3)

    assert pool.num_free == 1


def test_a_fenced_cached_block_can_be_shared_but_not_evicted() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1, Owner.SEQUENCE, A) or []
    pool.set_hash(blocks[0], hash_of(1))
    pool.release(blocks, A, fence=5)
    assert pool.num_idle(blocks) == 0

    pool.take(blocks, Owner.SEQUENCE, B)
    pool.retired(5)

    assert (pool.num_free, pool.num_fenced) == (1, 0)
    pool.release(blocks, B)
    assert pool.num_free == 2
    assert pool.check() == []


def test_a_block_released_twice_under_the_same_fence_comes_back_once() -> None:
    pool = BlockPool(1, 4)
    blocks = pool.allocate(1, Owner.SEQUENCE, A) or []
    pool.set_hash(blocks[0], hash_of(1))
    pool.release(blocks, A, fence=5)
    pool.take(blocks, Owner.SEQUENCE, B)
    pool.release(blocks, B, fence=5)

    pool.retired(5)

    assert pool.num_free == 1
    assert pool.check() == []


def test_a_transfer_hold_outlives_the_sequence_and_names_the_owner() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2, Owner.SEQUENCE, A) or []
    pool.take(blocks, Owner.SEND_PIN, TRANSFER)
    assert pool.owner[blocks[0]] == Owner.SEQUENCE

    pool.release(blocks, A)

    assert pool.num_free == 0
    assert pool.owner[blocks].tolist() == [Owner.SEND_PIN] * 2
    assert pool.owner_id[blocks].tolist() == [TRANSFER] * 2
    pool.release(blocks, TRANSFER)
    assert (pool.num_free, pool.holds) == (2, {})
    assert pool.check() == []


def test_the_same_transfer_may_hold_a_block_twice() -> None:
    pool, blocks = pool_with_cached(1)
    pool.take(blocks, Owner.SEND_PIN, TRANSFER)
    pool.take(blocks, Owner.SEND_PIN, TRANSFER)

    pool.release(blocks, TRANSFER)
    assert pool.num_free == 0
    pool.release(blocks, TRANSFER)

    assert pool.num_free == 1


def test_forgotten_content_is_free_at_once_or_when_released() -> None:
    pool, blocks = pool_with_cached(3)
    pool.take(blocks[:1], Owner.SEQUENCE, A)
    pool.take(blocks[1:2], Owner.SEQUENCE, A)
    pool.release(blocks[1:2], A, fence=4)

    pool.forget_hashes()
    assert pool.num_free == 1
    pool.release(blocks[:1], A)
    pool.retired(4)

    assert pool.num_free == 3
    assert pool.check() == []
    assert not pool.has_hash.any()


def test_releasing_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(1, 4)

    with pytest.raises(AssertionError):
        pool.release([0], A)


def test_taking_a_free_block_is_an_error() -> None:
    pool = BlockPool(1, 4)

    with pytest.raises(AssertionError):
        pool.take([0], Owner.SEQUENCE, A)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 4)
