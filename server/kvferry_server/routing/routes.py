"""Which sequence a STEP slot belongs to, per engine process, and the rows of a STEP as one value each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry_engine.wire.messages import Finish, PromptReport, Step, TokenLogprobs
from kvferry_engine.wire.packing import unpack_ids
from kvferry_server.routing.generation import Attempt, RunningRequest
from kvferry_server.routing.resume import SequenceRecord


@dataclass(slots=True)
class Route:
    """Where the rows of one slot go."""

    running: RunningRequest
    sequence: SequenceRecord
    attempt: Attempt


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence's part of a STEP or RESUMED; `offset` is the index of the first token in the sequence's output."""

    slot: int
    offset: int
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    report: PromptReport | None = None
    finish: Finish | None = None


class RouteTable:
    """Routes by engine boot and slot; slots are unique in an engine process for its whole life."""

    def __init__(self) -> None:
        self._routes: dict[str, dict[int, Route]] = {}

    def get(self, boot: str, slot: int) -> Route | None:
        return self._routes.get(boot, {}).get(slot)

    def add(self, slot: int, route: Route) -> None:
        self._routes.setdefault(route.attempt.boot, {})[slot] = route

    def drop(self, attempt: Attempt, sequence: SequenceRecord | None = None) -> None:
        """Forget the routes of an attempt, or of one sequence of it."""
        routes = self._routes.get(attempt.boot, {})
        for slot in attempt.slots:
            route = routes.get(slot)
            if route is not None and route.attempt is attempt and sequence in (None, route.sequence):
                del routes[slot]

    def forget(self, boot: str) -> None:
        """The process is gone."""
        self._routes.pop(boot, None)


def rows_of(step: Step) -> Iterator[Row]:
    """Yield the rows of a STEP. Raises ValueError for columns that do not fit together."""
    token_ids = unpack_ids(step.token_ids)
    slots = unpack_ids(step.slots)
    # An engine may have several rows of one sequence in a step; its finish comes after the last of them.
    last_rows = {slot: number for number, slot in enumerate(slots)} if step.finished else {}
    start = 0
    for number, (slot, count, offset) in enumerate(
        zip(slots, unpack_ids(step.counts), unpack_ids(step.offsets), strict=True)
    ):
        stop = start + count
        yield Row(
            slot=slot,
            offset=offset,
            ids=token_ids[start:stop],
            logprobs=step.logprobs.get(slot),
            prompt_logprobs=step.prompt_logprobs.get(slot),
            report=step.reports.get(slot),
            finish=step.finished.get(slot) if last_rows.get(slot) == number else None,
        )
        start = stop
