"""Which engine holds which block: hash -> bitmask of engines, so that one walk over a prompt's hashes serves them all.

Fed from EVENTS by `cache_events`; a wrong entry costs time, never correctness, since engines look up for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry_engine.wire.hashing import HASH_BYTES


def split_hashes(data: bytes) -> list[bytes]:
    """Return the hashes of a concatenated column. Raises ValueError when its length is no multiple of 16."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"a hash column has a multiple of {HASH_BYTES} bytes, this one has {len(data)}")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


class PrefixIndex:
    """Blocks of all engines, engines named by boot id. An engine's bit is reused after its removal."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._held: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        """Number of distinct blocks known."""
        return len(self._masks)

    def num_blocks(self, boot: str) -> int:
        """Number of blocks `boot` holds."""
        return len(self._held.get(boot, ()))

    def stored(self, boot: str, hashes: Iterable[bytes]) -> None:
        """Add blocks of an engine."""
        bit = self._bit(boot)
        held = self._held[boot]
        masks = self._masks
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit
            held.add(block)

    def removed(self, boot: str, hashes: Iterable[bytes]) -> None:
        """Drop blocks of an engine; unknown ones are ignored."""
        held = self._held.get(boot)
        if held is None:
            return
        bit = self._bits[boot]
        for block in hashes:
            if block in held:
                held.discard(block)
                self._clear(block, bit)

    def replace(self, boot: str, hashes: Iterable[bytes]) -> None:
        """Make `hashes` all that an engine holds (snapshot)."""
        wanted = set(hashes)
        self.removed(boot, self._held.get(boot, set()) - wanted)
        self.stored(boot, wanted)

    def remove_engine(self, boot: str) -> None:
        """Forget an engine; its cost is the number of blocks it held."""
        bit = self._bits.pop(boot, 0)
        for block in self._held.pop(boot, ()):
            self._clear(block, bit)

    def matched_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks of `hashes` each engine holds; engines with none are left out."""
        matched: dict[str, int] = {}
        if not self._bits:
            return matched
        running = -1
        for num_before, block in enumerate(hashes):
            still = self._masks.get(block, 0) & running
            if num_before and still != running:
                self._record(running & ~still, num_before, matched)
            running = still
            if not running:
                return matched
        if hashes:
            self._record(running, len(hashes), matched)
        return matched

    def _record(self, mask: int, num_blocks: int, matched: dict[str, int]) -> None:
        for boot, bit in self._bits.items():
            if bit & mask:
                matched[boot] = num_blocks

    def _clear(self, block: bytes, bit: int) -> None:
        left = self._masks[block] & ~bit
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]

    def _bit(self, boot: str) -> int:
        bit = self._bits.get(boot)
        if bit is None:
            taken = 0
            for other in self._bits.values():
                taken |= other
            # The lowest zero bit, so that masks stay small integers however often engines come and go.
            bit = ~taken & (taken + 1)
            self._bits[boot] = bit
            self._held[boot] = set()
        return bit
