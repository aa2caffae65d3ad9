"""Accounts for every KV block of an engine: who holds it, who may reuse it and when.

One entry per block in flat arrays, no object per block. A block is free, cached (nobody holds it, but its content is
indexed), or held; the last holder of an indexed block leaves it in a least-recently-used list from which `allocate` evicts.
A released block whose fence names a step that has not retired is parked until it has. `prefix_index` knows content, this
module only holders.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvferry_engine.wire.hashing import HASH_BYTES

NO_FENCE = -1
"""Fence of a block that no launched step touches."""
_UNLINKED = -1

Blocks = Sequence[int] | npt.NDArray[np.int32]


class Owner(IntEnum):
    """What holds a block."""

    FREE = 0
    CACHED = 1
    """Nobody holds it; its content is indexed and it may be evicted."""
    SEQUENCE = 2
    SEND_PIN = 3
    """Only a transfer that is sending it."""
    RECV_RESERVED = 4
    """Waiting for ferried content; not readable yet."""


class BlockPool:
    """The ledger of `num_blocks` blocks of `block_size` tokens.

    Arrays, all [num_blocks]: `ref` holders of all kinds; `held` those among them that are transfers (`take` with SEND_PIN or
    RECV_RESERVED); `owner`, `owner_id` the strongest holder (a sequence before a transfer; a shared block names the last
    sequence that took it); `fence` the last step that may touch a released block; `parked` released, waiting for that step;
    `has_hash`, `hashes` [num_blocks, 16] the content of indexed blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, on_evict: Callable[[bytes], None] | None = None) -> None:
        """`on_evict(hash)` is told about each block whose content is lost to an allocation; `Scheduler` sets it."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict = on_evict
        self.ref = np.zeros(num_blocks, dtype=np.int32)
        self.held = np.zeros(num_blocks, dtype=np.int32)
        self.owner = np.zeros(num_blocks, dtype=np.uint8)
        self.owner_id = np.full(num_blocks, -1, dtype=np.int64)
        self.fence = np.full(num_blocks, NO_FENCE, dtype=np.int64)
        self.parked = np.zeros(num_blocks, dtype=np.bool_)
        self.has_hash = np.zeros(num_blocks, dtype=np.bool_)
        self.hashes = np.zeros((num_blocks, HASH_BYTES), dtype=np.uint8)
        self.holds: dict[tuple[int, int], tuple[Owner, int]] = {}
        """(block, owner_id) of transfers -> what they hold it for, how often."""
        self.num_fenced = 0
        """Parked blocks: they come free when their step retires."""
        self.num_returned = 0
        """Blocks that became available since the start; unchanged means that waiting for room is still in vain."""
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._prev = array("i", [_UNLINKED]) * (num_blocks + 1)
        self._next = array("i", [_UNLINKED]) * (num_blocks + 1)
        self._prev[num_blocks] = self._next[num_blocks] = num_blocks
        self._num_cached = 0
        self._parked_batches: deque[tuple[int, npt.NDArray[np.int32]]] = deque()
        self._retired = NO_FENCE

    @property
    def num_free(self) -> int:
        """Blocks `allocate` can give now: free ones and evictable cached ones; parked ones are not among them."""
        return self._num_free + self._num_cached

    def num_idle(self, blocks: Blocks) -> int:
        """How many of these blocks count in `num_free` now (taking them makes the pool smaller)."""
        ids = np.asarray(blocks, dtype=np.int32)
        return int(np.count_nonzero((self.ref[ids] == 0) & ~self.parked[ids]))

    def allocate(self, n: int, owner: Owner, owner_id: int | npt.NDArray[np.int64]) -> list[int] | None:
        """Give `n` blocks with one holder each, or None and change nothing when fewer are available.

        `owner_id` is one id, or int64 [n]. Free blocks go first, then cached ones, least recently used first; `on_evict`
        hears of each of those.
        """
        if n > self.num_free:
            return None
        if n == 0:
            return []
        num_fresh = min(n, self._num_free)
        self._num_free -= num_fresh
        blocks: list[int] = self._free[self._num_free : self._num_free + num_fresh][::-1].tolist()
        while len(blocks) < n:
            blocks.append(self._evict())
        ids = np.asarray(blocks, dtype=np.int32)
        self.ref[ids] = 1
        self.owner[ids] = owner
        self.owner_id[ids] = owner_id
        return blocks

    def take(self, blocks: Blocks, owner: Owner, owner_id: int) -> None:
        """Add one holder to blocks that are cached or already held.

        SEND_PIN and RECV_RESERVED are a transfer's own holds beside those of sequences: with them a block outlives its
        sequence while it is being sent or scattered into. Free blocks cannot be taken: their content is undefined.
        """
        for block in blocks:
            if self.ref[block] == 0:
                self._revive(int(block))
            if owner is Owner.SEQUENCE or self.ref[block] == 0:
                self.owner[block] = owner
                self.owner_id[block] = owner_id
            self.ref[block] += 1
            if owner is not Owner.SEQUENCE:
                key = (int(block), owner_id)
                self.holds[key] = (owner, self.holds.get(key, (owner, 0))[1] + 1)
                self.held[block] += 1

    def release(self, blocks: Blocks, owner_id: int, *, fence: int = NO_FENCE) -> None:
        """Drop one holder of each block; `blocks` (no duplicates) are in prompt order.

        A transfer's hold is recognised by its owner_id. A block without holders goes to the cache when it is indexed, else it
        is free; deeper blocks are evicted before their parents. `fence`: the last launched step that may touch the blocks;
        until `retired(fence)` they are parked.
        """
        if not len(blocks):
            return
        ids = np.asarray(blocks, dtype=np.int32)
        assert (self.ref[ids] > 0).all(), "released a block nobody holds"
        self.ref[ids] -= 1
        if self.holds:
            self._drop_holds(ids, owner_id)
        last = ids[self.ref[ids] == 0]
        if not last.size:
            return
        self.owner[last] = np.where(self.has_hash[last], Owner.CACHED, Owner.FREE)
        self.owner_id[last] = -1
        self.fence[last] = fence
        if fence > self._retired:
            self.parked[last] = True
            self.num_fenced += last.size
            self._parked_batches.append((fence, last))
        else:
            self._make_available(last)

    def reassign(self, blocks: Blocks, owner: Owner, owner_id: int) -> None:
        """Change what held blocks are held for (a verified reservation becomes a sequence's)."""
        ids = np.asarray(blocks, dtype=np.int32)
        self.owner[ids] = owner
        self.owner_id[ids] = owner_id

    def retired(self, step_number: int) -> None:
        """Every step up to this one is done: blocks parked for it become available."""
        self._retired = max(self._retired, step_number)
        while self._parked_batches and self._parked_batches[0][0] <= self._retired:
            _, ids = self._parked_batches.popleft()
            due = ids[self.parked[ids] & (self.fence[ids] <= self._retired)]
            self.parked[due] = False
            self.num_fenced -= due.size
            self._make_available(due)

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Record that a held block's content is indexed."""
        self.has_hash[block] = True
        self.hashes[block] = np.frombuffer(block_hash, dtype=np.uint8)

    def forget_hashes(self) -> None:
        """Drop the content of every block: cached ones become free, held ones will be free when released."""
        self.has_hash[:] = False
        cached = np.flatnonzero(self.owner == Owner.CACHED).astype(np.int32)
        self.owner[cached] = Owner.FREE
        linked = cached[~self.parked[cached]]
        for block in linked:
            self._unlink(int(block))
        self._push_free(linked)

    def check(self) -> list[str]:
        """Return every broken invariant of the ledger itself (empty = sound). Slow; for the auditor."""
        problems = []
        free = self._free[: self._num_free]
        linked = self._linked()
        idle = self.ref == 0
        expected_cached = idle & self.has_hash & ~self.parked
        expected_free = idle & ~self.has_hash & ~self.parked
        if len(np.unique(free)) != free.size or not np.array_equal(np.sort(free), np.flatnonzero(expected_free)):
            problems.append("free list is not the set of free blocks")
        if sorted(linked) != np.flatnonzero(expected_cached).tolist() or len(linked) != self._num_cached:
            problems.append("cache list is not the set of cached blocks")
        if int(np.count_nonzero(self.parked)) != self.num_fenced:
            problems.append(f"{np.count_nonzero(self.parked)} blocks are parked, {self.num_fenced} are counted")
        held = np.zeros(self.num_blocks, dtype=np.int64)
        for (block, _), (_, count) in self.holds.items():
            held[block] += count
        claims = {
            "negative reference count": self.ref < 0,
            "parked but held": self.parked & ~idle,
            "more transfer holds than references": self.held > self.ref,
            "transfer holds miscounted": self.held != held,
            "free or cached but held": (self.owner <= Owner.CACHED) & ~idle,
            "owned but without holder": (self.owner > Owner.CACHED) & idle,
            "cached without hash": (self.owner == Owner.CACHED) & ~self.has_hash,
        }
        for what, wrong in claims.items():
            problems.extend(f"block {block}: {what}" for block in np.flatnonzero(wrong))
        return problems

    def _drop_holds(self, ids: npt.NDArray[np.int32], owner_id: int) -> None:
        for block in ids.tolist():
            key = (block, owner_id)
            hold = self.holds.get(key)
            if hold is not None:
                owner, count = hold
                self.held[block] -= 1
                if count == 1:
                    del self.holds[key]
                else:
                    self.holds[key] = (owner, count - 1)
            if self.ref[block] == self.held[block] > 0:
                self.owner[block], self.owner_id[block] = next(
                    (owner, holder) for (held, holder), (owner, _) in self.holds.items() if held == block
                )

    def _revive(self, block: int) -> None:
        assert self.has_hash[block], "took a free block"
        if self.parked[block]:
            self.parked[block] = False
            self.num_fenced -= 1
        else:
            self._unlink(block)

    def _make_available(self, ids: npt.NDArray[np.int32]) -> None:
        self.num_returned += ids.size
        hashed = self.has_hash[ids]
        self._push_free(ids[~hashed])
        for block in ids[hashed][::-1].tolist():
            self._link(block)

    def _push_free(self, ids: npt.NDArray[np.int32]) -> None:
        self._free[self._num_free : self._num_free + ids.size] = ids
        self._num_free += ids.size

    def _link(self, block: int) -> None:
        end = self.num_blocks
        last = self._prev[end]
        self._prev[block], self._next[block] = last, end
        self._next[last] = self._prev[end] = block
        self._num_cached += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._prev[block] = self._next[block] = _UNLINKED
        self._num_cached -= 1

    def _evict(self) -> int:
        block = self._next[self.num_blocks]
        self._unlink(block)
        self.has_hash[block] = False
        if self.on_evict is not None:
            self.on_evict(self.hashes[block].tobytes())
        return block

    def _linked(self) -> list[int]:
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks
