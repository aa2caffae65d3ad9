"""Chooses who gives up its blocks when the pool is empty, so that the loss is small and somebody always gets on.

The first running sequence in policy order is never chosen, so it always progresses and, in turn, everybody does. A sequence
that was preempted is spared until it has progressed, unless nobody else is left to make room for the first one.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.request import Sequence

Cost = tuple[int, int, float, int]


def preemption_cost(sequence: Sequence, policy: SchedulingPolicy) -> Cost:
    """Return the order of giving way: least important first, then fewest computed tokens, then latest."""
    priority = sequence.priority if policy is SchedulingPolicy.PRIORITY else 0
    return (-priority, sequence.num_computed, -sequence.arrival_s, -sequence.handle)


def is_protected(sequence: Sequence) -> bool:
    """True from a preemption until the sequence has progressed."""
    return sequence.num_preemptions > 0 and sequence.tokens_since_preemption == 0


def choose_victim(
    requester: Sequence, running: list[Sequence], holders: Iterable[Sequence], policy: SchedulingPolicy
) -> Sequence | None:
    """Return the cheapest sequence that must give way to `requester`, or None: the requester waits.

    `running` in policy order; `holders` wait, but hold ferried blocks. Only the first running sequence may displace more
    expensive or protected ones; anybody else waits rather than destroy more work than its own.
    """
    candidates = [sequence for sequence in (*running[1:], *holders) if sequence is not requester]
    unprotected = [sequence for sequence in candidates if not is_protected(sequence)]
    if requester is running[0]:
        eligible = unprotected or candidates
    else:
        own = preemption_cost(requester, policy)
        eligible = [sequence for sequence in unprotected if preemption_cost(sequence, policy) < own]
    return min(eligible, key=lambda sequence: preemption_cost(sequence, policy), default=None)
