"""The auditor sees every way in which claims and ledger can differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry_engine.kv_cache.auditor import TransferClaim, audit, leaked_blocks
from kvferry_engine.kv_cache.block_pool import BlockPool, Owner
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Sequence, Status
from kvferry_engine.wire.messages import Sampling

HASHES = [bytes([number]) * 16 for number in range(2)]


class World:
    """A running sequence with 2 indexed blocks and a partial one, a remote one with a reservation, and a pin."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 4)
        self.index = PrefixIndex()
        self.running = self.make(1, num_computed=9, owner=Owner.SEQUENCE)
        self.running.status = Status.RUNNING
        self.running.hashes = list(HASHES)
        for block, block_hash in zip(self.running.blocks[:2], HASHES, strict=True):
            self.index.insert(block_hash, block)
            self.pool.set_hash(block, block_hash)
        self.remote = self.make(2, num_computed=0, owner=Owner.RECV_RESERVED)
        self.remote.status = Status.REMOTE
        self.pool.take(self.running.blocks[:1], Owner.SEND_PIN, 900)
        self.claims = [TransferClaim(owner=Owner.SEND_PIN, owner_id=900, blocks=self.running.blocks[:1])]

    def make(self, handle: int, *, num_computed: int, owner: Owner) -> Sequence:
        sequence = Sequence(
            rid="r",
            index=0,
            handle=handle,
            tokens=np.zeros(16, dtype=np.int32),
            num_prompt=12,
            num_tokens=12,
            sampling=Sampling(max_tokens=1),
            seed=0,
            root=b"",
        )
        sequence.num_computed = num_computed
        sequence.blocks = self.pool.allocate(3, owner, handle) or []
        return sequence

    def audit(self) -> list[str]:
        return audit(self.pool, self.index, [self.running, self.remote], self.claims)


def test_a_sound_world_has_no_problems() -> None:
    world = World()

    assert world.audit() == []
    assert leaked_blocks(world.pool, [world.running, world.remote], world.claims) == []


def lose_a_block(world: World) -> None:
    world.running.blocks.pop()
    world.running.num_computed = 8


def claim_a_free_block(world: World) -> None:
    world.running.blocks.append(int(np.flatnonzero(world.pool.ref == 0)[0]))


def use_a_reserved_block(world: World) -> None:
    world.remote.num_computed = 4


def share_a_block_still_to_be_written(world: World) -> None:
    world.running.num_computed = 8
    world.pool.take(world.running.blocks[2:], Owner.SEQUENCE, 3)


def forget_a_pin(world: World) -> None:
    world.claims.clear()


def claim_a_pin_of_another_kind(world: World) -> None:
    world.claims[:] = [TransferClaim(owner=Owner.RECV_RESERVED, owner_id=900, blocks=world.running.blocks[:1])]


def compute_beyond_the_blocks(world: World) -> None:
    world.running.num_computed = 13


def index_under_another_hash(world: World) -> None:
    world.running.hashes[0] = b"x" * 16


def index_without_telling_the_pool(world: World) -> None:
    world.index.insert(b"y" * 16, world.running.blocks[2])


def miscount(world: World) -> None:
    world.pool.num_fenced += 1


def hold_a_free_block(world: World) -> None:
    world.pool.ref[np.flatnonzero(world.pool.ref == 0)[0]] = 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        claim_a_free_block,
        use_a_reserved_block,
        share_a_block_still_to_be_written,
        forget_a_pin,
        claim_a_pin_of_another_kind,
        compute_beyond_the_blocks,
        index_under_another_hash,
        index_without_telling_the_pool,
        miscount,
        hold_a_free_block,
    ],
)
def test_every_kind_of_damage_is_seen(damage: Callable[[World], None]) -> None:
    world = World()

    damage(world)

    assert world.audit()


def test_leaked_blocks_are_named() -> None:
    world = World()
    lost = world.running.blocks[2]
    lose_a_block(world)

    assert leaked_blocks(world.pool, [world.running, world.remote], world.claims) == [lost]
