"""The default policy: the engine with the shortest estimated time, counting what it has cached and how busy it is."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvferry_server.routing import cost
from kvferry_server.routing.policies.base import Candidate, role_rank
from kvferry_server.routing.snapshot import RoutedRequest

_RESOLUTION_S = 0.001
"""Estimates closer than this are equal; the less busy engine is better then."""


class KVAware:
    """Seconds to the first token (queue, uncached tokens, transfer) plus the cost of sharing the engine afterwards."""

    def __init__(self, randomness: random.Random) -> None:
        self._randomness = randomness

    def order(self, candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]:
        def key(candidate: Candidate) -> tuple[int, int, int, float]:
            estimate_s = candidate.plan.estimate_s + cost.decode_s(candidate.engine, request)
            ticks = int(estimate_s / _RESOLUTION_S)
            return role_rank(candidate), ticks, candidate.engine.load.num_in_flight, self._randomness.random()

        return sorted(candidates, key=key)
