"""Plain counts of what routing did, read by `engines.metrics_collector`; nothing here knows Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class MoveCause(StrEnum):
    """Why a running request went to another engine."""

    DEATH = "death"
    HANDOFF = "handoff"
    FORGOTTEN = "forgotten"
    """The engine came back but does not know the request any more."""
    RELINK = "relink"
    """The connection broke and the request cannot be resumed in place (log-probs)."""


@dataclass(slots=True)
class RoutingStats:
    """Totals since the start of this router."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Submissions by (reason, "remote" or "local")."""
    rejections: Counter[str] = field(default_factory=Counter)
    """REJECTED answers by code; `timeout`, `suspect` and `died` for none."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests refused before queueing, by limit."""
    moves: Counter[MoveCause] = field(default_factory=Counter)
    num_failed: int = 0
    """Running requests that ended in an error because no engine could continue them."""
    num_resumed_in_place: int = 0
    num_duplicate_tokens: int = 0
    num_gaps: int = 0
    num_stray_rows: int = 0
    """STEP rows of attempts that are over."""
