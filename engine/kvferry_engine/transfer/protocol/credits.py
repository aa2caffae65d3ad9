"""Shares the staging slots of one receiver rank among all sender ranks: granted credits plus slots in use never exceed the slots.

A credit is the right to announce one chunk on one pair. Only pairs with a live transfer get credits; a sender gives back what
it cannot use. Both ends keep a book: `CreditPool` here, a plain count per pair at the sender.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class CreditPool(Generic[P]):
    """Slots of one rank. `P` names a pair (peer and its rank)."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._granted: dict[P, int] = {}
        self._used: dict[P, int] = {}

    @property
    def num_free(self) -> int:
        """Slots neither in use nor promised."""
        return self.num_slots - sum(self._granted.values()) - sum(self._used.values())

    def held(self, pair: P) -> int:
        """Credits and slots a pair has."""
        return self._granted.get(pair, 0) + self._used.get(pair, 0)

    def grant(self, pairs: Iterable[P]) -> list[tuple[P, int]]:
        """Promise free slots to pairs with live transfers: first one to each that has none, then up to an equal share.

        The share leaves room for one newcomer. Returns (pair, credits) with credits > 0.
        """
        active = list(pairs)
        if not active:
            return []
        given: dict[P, int] = {}
        share = max(1, self.num_slots // (len(active) + 1))
        for limit in (1, share):
            for pair in sorted(active, key=self.held):
                count = min(limit - self.held(pair), self.num_free)
                if count > 0:
                    self._granted[pair] = self._granted.get(pair, 0) + count
                    given[pair] = given.get(pair, 0) + count
        return list(given.items())

    def consume(self, pair: P) -> bool:
        """A chunk was announced: turn one credit into a slot in use. False when the pair had none (a protocol error)."""
        if self._granted.get(pair, 0) <= 0:
            return False
        self._granted[pair] -= 1
        self._used[pair] = self._used.get(pair, 0) + 1
        return True

    def release(self, pair: P) -> None:
        """The slot of one announced chunk is free again."""
        assert self._used.get(pair, 0) > 0
        self._used[pair] -= 1
        if not self._used[pair]:
            del self._used[pair]

    def give_back(self, pair: P, count: int) -> None:
        """The sender returned credits it does not need; more than it has, or for a closed pair, counts as none."""
        if 0 < count <= self._granted.get(pair, 0):
            self._granted[pair] -= count

    def drop(self, pair: P) -> None:
        """The pair is closed: its credits are void. Slots in use stay used until `release`."""
        self._granted.pop(pair, None)
