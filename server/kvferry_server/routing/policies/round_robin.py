"""Engines in turn, by name."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry_server.routing.policies.base import Candidate, role_rank
from kvferry_server.routing.snapshot import RoutedRequest


class RoundRobin:
    """Starts one engine further for every request."""

    def __init__(self) -> None:
        self._turn = 0

    def order(self, candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]:
        willing = sorted((c for c in candidates if role_rank(c) == 0), key=_name)
        others = sorted((c for c in candidates if role_rank(c) == 1), key=_name)
        turn, self._turn = self._turn, self._turn + 1
        return _rotated(willing, turn) + _rotated(others, turn)


def _name(candidate: Candidate) -> tuple[str, str]:
    return candidate.engine.name, candidate.engine.boot


def _rotated(candidates: list[Candidate], turn: int) -> list[Candidate]:
    start = turn % len(candidates) if candidates else 0
    return candidates[start:] + candidates[:start]
