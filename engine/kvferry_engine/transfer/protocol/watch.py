"""Notices a wedged pair: the oldest payload that was announced on it does not come.

A slow wire still brings payloads one after the other, so only the oldest one is timed. A pair is watched whether or not anybody
still wants what it carries: a payload that never ends would keep a slot here and pinned blocks there.
"""

from __future__ import annotations

from collections import OrderedDict

LOOK_S = 0.5
"""One look at the clock adds at most this much, so that a long model step here is not taken for a silent wire."""


class PayloadWatch:
    """Announced payloads of one pair, oldest first."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._outstanding: OrderedDict[int, None] = OrderedDict()
        self._waited_s = 0.0
        self._looked_s = 0.0

    def announced(self, pair_seq: int, now: float) -> None:
        if not self._outstanding:
            self._restart(now)
        self._outstanding[pair_seq] = None

    def arrived(self, pair_seq: int, now: float) -> None:
        """A payload ended, well or not."""
        is_oldest = next(iter(self._outstanding), None) == pair_seq
        self._outstanding.pop(pair_seq, None)
        if is_oldest:
            self._restart(now)

    def next_timer_s(self) -> float | None:
        """When `is_stalled` should be asked again."""
        if not self._outstanding:
            return None
        return self._looked_s + min(LOOK_S, max(self._stall_s - self._waited_s, 0.0))

    def is_stalled(self, now: float) -> bool:
        """Look at the clock; True when the oldest payload has been waited for too long."""
        if not self._outstanding:
            return False
        self._waited_s += min(max(now - self._looked_s, 0.0), LOOK_S)
        self._looked_s = now
        return self._waited_s >= self._stall_s

    def _restart(self, now: float) -> None:
        self._waited_s = 0.0
        self._looked_s = now
