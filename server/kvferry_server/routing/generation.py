"""A running request as its dialect sees it: events in, out to one reader, whatever engines come and go behind it.

Events that the reader has not taken yet are merged per sequence, so a slow client costs one event per sequence and its own
tokens, and never holds up an engine or another client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvferry_engine.wire.messages import Accepted, Finish, PromptReport, Rejected, Submit, TokenLogprobs
from kvferry_server.engines.client import EngineClient
from kvferry_server.errors import ApiError
from kvferry_server.requests import TokenEvent
from kvferry_server.routing.resume import ResumeRecord, SequenceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost:
    """No answer will come. `died`: the engine ended unasked (counts against the request)."""

    reason: str
    died: bool


Answer = Accepted | Rejected | AttemptLost


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One SUBMIT to one engine boot; `slots` name its sequences in STEP once it was accepted."""

    submit: Submit
    engine: EngineClient
    output_hash: str
    answer: asyncio.Future[Answer]
    burdened: tuple[str, ...]
    """Boots in whose load this attempt is booked: the engine and the first prefill hint."""
    slots: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.submit.attempt

    @property
    def boot(self) -> str:
        return self.submit.engine_boot

    def settle(self, answer: Answer) -> None:
        """Give the answer to whoever waits; later ones are ignored."""
        if not self.answer.done():
            self.answer.set_result(answer)


class RunningRequest:
    """Implements `requests.Generation`. The dispatcher fills it; `on_stop` and `on_close` call back into the dispatcher."""

    def __init__(
        self,
        record: ResumeRecord,
        *,
        deadline_s: float | None,
        on_stop: Callable[[RunningRequest, SequenceRecord], None],
        on_close: Callable[[RunningRequest], None],
    ) -> None:
        self.record = record
        self.deadline_s = deadline_s
        self.current: Attempt | None = None
        """The accepted attempt that feeds this request."""
        self.pending: Attempt | None = None
        """An attempt without an answer so far; beside `current` during a hand-off."""
        self.mover: asyncio.Task[None] | None = None
        """The task that is moving this request to another engine."""
        self.orphaned_s: float | None = None
        """Since when no engine runs it."""
        self.closed = False
        self._decode_engine = ""
        self._prefill_engine = ""
        self._on_stop = on_stop
        self._on_close = on_close
        self._ready: dict[int, TokenEvent] = {}
        self._num_open = len(record.sequences)
        self._error: ApiError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    # --- Generation ---------------------------------------------------------------------------------------------------

    @property
    def decode_engine(self) -> str:
        return self._decode_engine

    @property
    def prefill_engine(self) -> str:
        """Known with the first token; empty when the prompt was not ferried."""
        return self._prefill_engine

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield events until every sequence has finished. Raises ApiError when the request cannot be continued."""
        while True:
            while self._ready:
                yield self._ready.pop(next(iter(self._ready)))
            if self._error is not None:
                raise self._error
            if self._num_open == 0 or self.closed:
                return
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None

    async def stop(self, index: int) -> None:
        sequence = self.record.sequences[index]
        self._ready.pop(index, None)
        if sequence.is_open:
            sequence.stopped = True
            self._num_open -= 1
            self._on_stop(self, sequence)
            self._wake()

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self)
            self._wake()

    # --- for the dispatcher -------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Nothing more can come: all sequences ended, it failed, or its reader left."""
        return self._num_open == 0 or self.closed or self._error is not None

    def activate(self, attempt: Attempt) -> None:
        """`attempt` was accepted and feeds the request from now on."""
        self.current = attempt
        self.pending = None
        self.orphaned_s = None
        self._decode_engine = attempt.engine.name

    def deliver(
        self,
        sequence: SequenceRecord,
        ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        report: PromptReport | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Queue what is new of one open sequence and wake the reader; `ids` is kept."""
        event = self._ready.get(sequence.index)
        if event is None:
            event = self._ready[sequence.index] = TokenEvent(index=sequence.index, token_ids=ids, logprobs=logprobs)
        else:
            event.token_ids = event.token_ids + ids
            if logprobs is not None:
                event.logprobs = (event.logprobs or []) + logprobs
        if report is not None and not sequence.has_report:
            sequence.has_report = True
            self._prefill_engine = self._prefill_engine or report.prefill_engine
            event.report = report
            event.prompt_logprobs = prompt_logprobs
        if finish is not None:
            sequence.finish = finish
            event.finish = finish
            self._num_open -= 1
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the request with an error, after the events already queued."""
        if not self.is_over:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
