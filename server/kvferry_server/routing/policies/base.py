"""The shape of a routing policy: it orders candidates, the dispatcher tries them in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry_engine.wire.messages import Role
from kvferry_server.routing.disaggregation import PrefillPlan
from kvferry_server.routing.snapshot import EngineSnapshot, RoutedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that could decode the request, and how it would get the prompt."""

    engine: EngineSnapshot
    plan: PrefillPlan


class Policy(Protocol):
    """A choice of decode engines: `order` returns all candidates, best first.

    Roles rank before anything else, but exclude nobody.
    """

    def order(self, candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]: ...


def role_rank(candidate: Candidate) -> int:
    """Return 0 for engines that like to decode, 1 for prefill engines: those decode only when nobody else can."""
    return int(candidate.engine.role is Role.PREFILL)
