"""The engine with the fewest sequences for its size; caches are ignored."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvferry_server.routing.policies.base import Candidate, role_rank
from kvferry_server.routing.snapshot import RoutedRequest


class LeastLoad:
    """Fewest sequences per seat, then fewest prompt tokens waiting, then chance."""

    def __init__(self, randomness: random.Random) -> None:
        self._randomness = randomness

    def order(self, candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]:
        def key(candidate: Candidate) -> tuple[int, float, int, float]:
            engine = candidate.engine
            share = engine.load.num_in_flight / engine.max_num_seqs
            return role_rank(candidate), share, engine.load.waiting_tokens, self._randomness.random()

        return sorted(candidates, key=key)
