"""Finds an engine for a request: the first one, and the next one when the request has to move.

Busy, draining or silent engines are passed over; a wrong request is the client's error at once. Every wait has an end: the
submit timeout for new requests, the resume wait and the request's own deadline for running ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry_engine.wire.messages import Abort, Accepted, RejectCode, Rejected
from kvferry_server.engines.client import EngineClient
from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.errors import (
    ApiError,
    BadRequestError,
    EngineFailedError,
    NotImplementedByModelError,
    ServiceUnavailableError,
)
from kvferry_server.routing.chooser import Choice, Chooser
from kvferry_server.routing.disaggregation import Reason
from kvferry_server.routing.generation import Answer, Attempt, AttemptLost, RunningRequest
from kvferry_server.routing.load_book import LoadBook
from kvferry_server.routing.stats import RoutingStats
from kvferry_server.settings import OnPrefillUnavailable

logger = logging.getLogger(__name__)

NO_ENGINE_RETRY_S = 2.0
"""Retry-After when there is no engine at all."""
_MAX_REMEMBERED_BOOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLimits:
    """Times in seconds."""

    submit_s: float = 30.0
    """Longest search for an engine that accepts a new request."""
    accept_s: float = 15.0
    """Longest wait for one engine's answer."""
    resume_s: float = 60.0
    """Longest time a running request may be without an engine."""
    busy_retry_s: float = 0.25
    """Pause of a running request after every engine was busy."""
    on_prefill_unavailable: OnPrefillUnavailable = OnPrefillUnavailable.DECODE_LOCALLY


class Cancellations:
    """Sends ABORT for submissions nobody wants any more; one that cannot be sent now is sent when the boot comes back."""

    def __init__(self) -> None:
        self._owed: OrderedDict[str, set[str]] = OrderedDict()

    def cancel(self, engine: EngineClient, boot: str, rid: str) -> None:
        """Stop `rid` at the engine process `boot`."""
        if engine.boot == boot and engine.send(Abort(rid=rid)):
            return
        self._owed.setdefault(boot, set()).add(rid)
        while len(self._owed) > _MAX_REMEMBERED_BOOTS:
            self._owed.popitem(last=False)

    def settle(self, engine: EngineClient) -> None:
        """The engine is connected (again): send what is owed to it."""
        for rid in sorted(self._owed.pop(engine.boot, ())):
            engine.send(Abort(rid=rid))


class Placement:
    """Submits requests until an engine accepts."""

    def __init__(
        self,
        *,
        chooser: Chooser,
        registry: EngineRegistry,
        load_book: LoadBook,
        stats: RoutingStats,
        cancellations: Cancellations,
        limits: PlacementLimits,
        clock: Callable[[], float],
    ) -> None:
        self._chooser = chooser
        self._registry = registry
        self._load_book = load_book
        self._stats = stats
        self._cancellations = cancellations
        self._limits = limits
        self._clock = clock

    async def place_new(self, running: RunningRequest) -> None:
        """Return once an engine accepted the request.

        Raises BadRequestError, NotImplementedByModelError, ServiceUnavailableError, EngineFailedError.
        """
        until_s = self._clock() + self._limits.submit_s
        tried: set[str] = set()
        retry_after_s: float | None = None
        while True:
            choice = self._chooser.choose(running.record, exclude=tried)
            if choice is None or self._clock() >= until_s:
                raise _no_engine(num_tried=len(tried), retry_after_s=retry_after_s)
            self._check_prefill_available(choice)
            answer = await self._try(running, choice, until_s)
            if answer is None:
                return
            tried.add(choice.engine.boot)
            if isinstance(answer, Rejected):
                _raise_if_wrong(answer)
                if answer.retry_after_s > 0:
                    retry_after_s = min(answer.retry_after_s, retry_after_s or answer.retry_after_s)
            elif answer.died:
                _raise_if_poisonous(running)

    async def place_again(self, running: RunningRequest, source: EngineClient | None) -> None:
        """Move a running request to another engine; returns when one accepted it or the request is over.

        `source`: the draining engine that still runs it. Raises EngineFailedError.
        """
        source_boot = source.boot if source is not None else ""
        tried: set[str] = set()
        while not running.is_over:
            until_s = self._resume_until_s(running)
            if self._clock() >= until_s:
                raise EngineFailedError(
                    "the engine that ran this request is gone and no other could continue it in time"
                )
            if source is not None and (not source.connected or source.boot != source_boot):
                source = None
            choice = self._chooser.choose(running.record, exclude=tried, handoff_from=source)
            if choice is None:
                pause_s = self._limits.busy_retry_s if tried else self._limits.resume_s
                await self._registry.wait_for_change(max(0.0, min(pause_s, until_s - self._clock())))
                tried.clear()
                continue
            answer = await self._try(running, choice, min(until_s, self._clock() + self._limits.accept_s))
            if answer is None:
                return
            tried.add(choice.engine.boot)
            if isinstance(answer, Rejected) and answer.code in (RejectCode.INVALID, RejectCode.UNSUPPORTED):
                raise EngineFailedError(f"the request could not be continued elsewhere: {answer.message}")
            if isinstance(answer, AttemptLost) and answer.died:
                _raise_if_poisonous(running)

    def _resume_until_s(self, running: RunningRequest) -> float:
        """Return the moment to give up: never while an engine still runs the request."""
        if running.orphaned_s is None:
            return float("inf")
        until_s = running.orphaned_s + self._limits.resume_s
        return until_s if running.deadline_s is None else min(until_s, running.deadline_s)

    def _check_prefill_available(self, choice: Choice) -> None:
        if (
            choice.plan.reason is Reason.NO_PREFILL_ENGINE
            and self._limits.on_prefill_unavailable is OnPrefillUnavailable.REJECT
        ):
            raise ServiceUnavailableError("no prefill engine is available", retry_after_s=NO_ENGINE_RETRY_S)

    async def _try(self, running: RunningRequest, choice: Choice, until_s: float) -> Rejected | AttemptLost | None:
        """Send one SUBMIT and wait for the answer: None = accepted, else nothing of the submission is left behind."""
        attempt = self._submit(running, choice)
        timeout_s = max(0.0, min(self._limits.accept_s, until_s - self._clock()))
        answer: Answer
        try:
            async with asyncio.timeout(timeout_s):
                answer = await attempt.answer
        except TimeoutError:
            answer = AttemptLost(reason="timeout", died=False)
        # ACCEPTED may have come in the same turn of the loop as the timeout.
        if isinstance(answer, Accepted) or running.current is attempt:
            return None
        running.pending = None
        for boot in attempt.burdened:
            self._load_book.released(boot, running.record.wire_rid)
        if isinstance(answer, AttemptLost):
            self._cancellations.cancel(attempt.engine, attempt.boot, running.record.wire_rid)
        why = answer.reason if isinstance(answer, AttemptLost) else str(answer.code)
        self._stats.rejections[why] += 1
        logger.info("request not taken: request=%s engine=%s why=%s", attempt.submit.rid, attempt.engine.name, why)
        return answer

    def _submit(self, running: RunningRequest, choice: Choice) -> Attempt:
        engine, plan, record = choice.engine, choice.plan, running.record
        assert engine.model is not None
        remaining_s = None if running.deadline_s is None else max(0.0, running.deadline_s - self._clock())
        attempt = Attempt(
            submit=record.submission(
                engine.boot, remaining_s=remaining_s, hints=plan.hints, force_remote=plan.force_remote
            ),
            engine=engine,
            output_hash=engine.model.output_hash,
            answer=asyncio.get_running_loop().create_future(),
            burdened=(engine.boot, plan.hints[0].boot) if plan.remote else (engine.boot,),
        )
        running.pending = attempt
        self._book(attempt, choice, record.num_context_tokens)
        self._stats.decisions[plan.reason, "remote" if plan.remote else "local"] += 1
        if not engine.send(attempt.submit):
            attempt.settle(AttemptLost(reason="disconnected", died=False))
        return attempt

    def _book(self, attempt: Attempt, choice: Choice, num_tokens: int) -> None:
        """Count the work where it will be done, until the engines' own reports do."""
        num_sequences = len(attempt.submit.sequences)
        rid = attempt.submit.rid
        uncached = max(1, num_tokens - choice.cached_tokens)
        if choice.plan.remote:
            hint = choice.plan.hints[0]
            self._load_book.submitted(hint.boot, rid, num_sequences=0, tokens=max(1, num_tokens - hint.cached_tokens))
            uncached = 1
        self._load_book.submitted(attempt.boot, rid, num_sequences=num_sequences, tokens=uncached)


def _raise_if_wrong(rejected: Rejected) -> None:
    if rejected.code is RejectCode.INVALID:
        raise BadRequestError(rejected.message, param=rejected.param)
    if rejected.code is RejectCode.UNSUPPORTED:
        raise NotImplementedByModelError(rejected.message, param=rejected.param)


def _raise_if_poisonous(running: RunningRequest) -> None:
    if not running.record.may_retry_after_death():
        raise EngineFailedError("two engines in a row ended while running this request")


def _no_engine(*, num_tried: int, retry_after_s: float | None) -> ApiError:
    if num_tried == 0:
        return ServiceUnavailableError("no engine is ready", retry_after_s=NO_ENGINE_RETRY_S)
    return ServiceUnavailableError(
        f"all {num_tried} engines are busy or not answering", retry_after_s=retry_after_s or NO_ENGINE_RETRY_S
    )
