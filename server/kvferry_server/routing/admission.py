"""Refuses new requests before they queue, when the engines already have more waiting than the settings allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry_server.errors import TooManyRequestsError
from kvferry_server.routing import cost
from kvferry_server.routing.snapshot import EngineSnapshot

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class Refusal(StrEnum):
    """Label of `vllm:admission_rejections`."""

    MAX_QUEUED_REQUESTS = "max_num_queued_reqs"
    MAX_QUEUED_TOKENS = "max_num_queued_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """0 = no limit."""

    max_queued_requests: int = 0
    max_queued_tokens: int = 0


class QueueFullError(TooManyRequestsError):
    """Carries which limit was reached, for the metric."""

    def __init__(self, message: str, *, refusal: Refusal, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.refusal = refusal


def num_queued(engine: EngineSnapshot) -> int:
    """Sequences waiting on an engine: those it reports, and those sent since beyond its free seats."""
    load = engine.load
    free_seats = max(0, engine.max_num_seqs - load.num_running - load.num_waiting)
    return load.num_waiting + max(0, load.num_pending - free_seats)


def admit(engines: Sequence[EngineSnapshot], *, num_sequences: int, limits: QueueLimits) -> None:
    """Raise QueueFullError (429, with Retry-After) when a request with `num_sequences` would pass a limit.

    A request that finds a free seat is never refused by the request limit.
    """
    queued = sum(num_queued(engine) for engine in engines)
    free = sum(max(0, engine.max_num_seqs - engine.load.num_in_flight) for engine in engines)
    beyond = queued + max(0, num_sequences - free)
    if limits.max_queued_requests and beyond > limits.max_queued_requests and num_sequences > free:
        raise QueueFullError(
            f"{queued} requests are waiting, the limit is {limits.max_queued_requests}; try again later",
            refusal=Refusal.MAX_QUEUED_REQUESTS,
            retry_after_s=retry_after_s(engines),
        )
    tokens = sum(engine.load.waiting_tokens for engine in engines)
    if limits.max_queued_tokens and tokens >= limits.max_queued_tokens:
        raise QueueFullError(
            f"{tokens} prompt tokens are waiting, the limit is {limits.max_queued_tokens}; try again later",
            refusal=Refusal.MAX_QUEUED_TOKENS,
            retry_after_s=retry_after_s(engines),
        )


def retry_after_s(engines: Sequence[EngineSnapshot]) -> float:
    """Return when trying again makes sense: the shortest queue's time, between 1 and 60 s."""
    shortest_s = min((cost.queue_s(engine) for engine in engines), default=0.0)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, shortest_s))
