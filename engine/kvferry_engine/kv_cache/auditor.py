"""Compares what the parts claim with what the ledger says, block by block: nothing leaked, nothing shared by mistake.

Runs after every step of the scheduler's tests and, in production, when the engine idles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry_engine.kv_cache.block_pool import BlockPool, Owner
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Sequence, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferClaim:
    """Blocks a transfer took for itself (`BlockPool.take`), one hold each: SEND_PIN or RECV_RESERVED.

    What `Scheduler.reserve_remote` gave belongs to the sequence and is not claimed here.
    """

    owner: Owner
    owner_id: int
    blocks: list[int]


def audit(
    pool: BlockPool, index: PrefixIndex, sequences: Iterable[Sequence], transfers: Iterable[TransferClaim]
) -> list[str]:
    """Return every disagreement (empty = every block has exactly the holders the parts claim).

    `sequences` are all unfinished ones, `transfers` the holds of transfers under way.
    """
    sequences, transfers = list(sequences), list(transfers)
    problems = pool.check()
    claimed = _claimed(pool, sequences, transfers)
    for block in np.flatnonzero(claimed != pool.ref).tolist():
        problems.append(f"block {block}: {pool.ref[block]} holders counted, {claimed[block]} claim it")
    for sequence in sequences:
        problems.extend(_check_sequence(pool, sequence))
    for transfer in transfers:
        for block in transfer.blocks:
            owner, _ = pool.holds.get((block, transfer.owner_id), (Owner.FREE, 0))
            if owner is not transfer.owner:
                problems.append(
                    f"block {block}: transfer {transfer.owner_id} claims {transfer.owner.name}, the ledger {owner.name}"
                )
    problems.extend(_check_index(pool, index))
    return problems


def leaked_blocks(pool: BlockPool, sequences: Iterable[Sequence], transfers: Iterable[TransferClaim]) -> list[int]:
    """Return the blocks with more holders than claims: nobody will ever release them."""
    return np.flatnonzero(pool.ref > _claimed(pool, sequences, transfers)).tolist()


def _claimed(
    pool: BlockPool, sequences: Iterable[Sequence], transfers: Iterable[TransferClaim]
) -> npt.NDArray[np.int32]:
    claimed = np.zeros(pool.num_blocks, dtype=np.int32)
    for blocks in (*(sequence.blocks for sequence in sequences), *(transfer.blocks for transfer in transfers)):
        np.add.at(claimed, np.asarray(blocks, dtype=np.int64), 1)
    return claimed


def _check_sequence(pool: BlockPool, sequence: Sequence) -> list[str]:
    name = f"sequence {sequence.handle}"
    problems = []
    if len(set(sequence.blocks)) != len(sequence.blocks):
        problems.append(f"{name}: holds a block twice")
    num_readable = -(-sequence.num_computed // pool.block_size)
    if num_readable > len(sequence.blocks):
        problems.append(f"{name}: {sequence.num_computed} computed tokens in {len(sequence.blocks)} blocks")
    for position, block in enumerate(sequence.blocks):
        is_reserved = sequence.status is Status.REMOTE and position >= num_readable
        owner = Owner(pool.owner[block])
        if owner is not (Owner.RECV_RESERVED if is_reserved else Owner.SEQUENCE):
            problems.append(f"{name}: block {block} belongs to {owner.name}")
        if pool.ref[block] - pool.held[block] > 1 and position * pool.block_size >= sequence.num_computed:
            problems.append(f"{name}: shares block {block}, which is still to be written")
        if pool.has_hash[block] and (
            position >= len(sequence.hashes) or pool.hashes[block].tobytes() != sequence.hashes[position]
        ):
            problems.append(f"{name}: block {block} is indexed under another content")
    return problems


def _check_index(pool: BlockPool, index: PrefixIndex) -> list[str]:
    problems = [
        f"block {block}: indexed, but the ledger knows another content"
        for block_hash, block in index.items()
        if not pool.has_hash[block] or pool.hashes[block].tobytes() != block_hash
    ]
    num_hashed = int(np.count_nonzero(pool.has_hash))
    if num_hashed != len(index):
        problems.append(f"{num_hashed} blocks have a hash, {len(index)} are indexed")
    return problems
