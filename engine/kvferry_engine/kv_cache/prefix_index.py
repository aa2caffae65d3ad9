"""Finds cached KV by content: block hash to block, and the stream of changes that routers follow.

The chain of hashes (`wire.hashing`) makes a block's hash stand for its whole prefix, so a leading run of known hashes is a
reusable prefix. Who holds a block is `block_pool`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable


class PrefixIndex:
    """Map of 16-byte block hash to block id; one block per hash, one hash per block."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.num_inserted = 0
        """Insertions since the start; unchanged means that a failed lookup would fail again."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_hash: bytes) -> int | None:
        """Return the block with this content."""
        return self._blocks.get(block_hash)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest leading run of known hashes."""
        blocks = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Make a full block findable. False, and nothing changes, when another block already has this content."""
        if block_hash in self._blocks:
            return False
        self._blocks[block_hash] = block
        self.num_inserted += 1
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None
        return True

    def remove(self, block_hash: bytes) -> None:
        """Forget a block's content; unknown hashes are ignored."""
        if self._blocks.pop(block_hash, None) is None:
            return
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def clear(self) -> None:
        """Forget everything."""
        for block_hash in list(self._blocks):
            self.remove(block_hash)

    def drain_events(self) -> tuple[bytes, bytes]:
        """Return the hashes stored and removed since the last call, concatenated; what came and went in between is in neither."""
        stored, removed = b"".join(self._stored), b"".join(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def snapshot(self) -> bytes:
        """Return all stored hashes, concatenated. Call `drain_events` first, so that the next events follow on it."""
        return b"".join(self._blocks)

    def items(self) -> Iterable[tuple[bytes, int]]:
        """All (hash, block) pairs."""
        return self._blocks.items()
