"""How long a router waits for what on a connection, and the pure rule that turns silence into a verdict.

Kept apart from sockets so that the rule is a table in a test; `client` feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry_engine.wire.messages import BEAT_INTERVAL_S, DEAD_AFTER_S, SUSPECT_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """Intervals of one connection, in seconds."""

    beat_s: float = BEAT_INTERVAL_S
    suspect_s: float = SUSPECT_AFTER_S
    """Silence after which an engine gets no new work."""
    dead_s: float = DEAD_AFTER_S
    """Silence after which its requests are continued elsewhere."""
    connect_s: float = 3.0
    """Longest time for TCP connect, CURVE and HELLO."""
    resume_grace_s: float = 1.5
    """After a lost connection: how long the same boot may take to come back before its requests move on."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    refused_hello_s: float = 5.0
    """Pause after an engine that must not be used (other service, other wire version)."""
    assets_s: float = 30.0
    """Longest wait for one piece of the asset bundle."""


class Verdict(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class Silence:
    """Judges how long a peer has been silent; time during which this process itself stood still does not count."""

    def __init__(self, timings: LinkTimings, now: float) -> None:
        self._timings = timings
        self._heard = now
        self._ticked = now

    def heard(self, now: float) -> None:
        self._heard = now

    def tick(self, now: float) -> Verdict:
        """Judge at `now`; call about every `beat_s`. A late call forgives the peer for the time we were asleep."""
        late_s = now - self._ticked - 2 * self._timings.beat_s
        if late_s > 0:
            self._heard = min(now, self._heard + late_s)
        self._ticked = now
        silent_s = now - self._heard
        if silent_s >= self._timings.dead_s:
            return Verdict.DEAD
        return Verdict.SUSPECT if silent_s >= self._timings.suspect_s else Verdict.ALIVE


def backoff_s(timings: LinkTimings, num_failures: int) -> float:
    """Return the pause before dial number `num_failures` + 1: none at first, then doubling up to `backoff_max_s`."""
    if num_failures == 0:
        return 0.0
    return min(timings.backoff_max_s, timings.backoff_min_s * 2.0 ** min(num_failures - 1, 16))
