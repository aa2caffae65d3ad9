"""The real `Gateway`: starts requests on engines, feeds their events, and moves them when an engine dies, drains or forgets.

It subscribes to the registry after the cache events. Everything in the callbacks is synchronous and short; waiting happens
in `placement`, one task per request that has to move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvferry_engine.wire.messages import (
    Abort,
    Accepted,
    Beat,
    Finish,
    FinishReason,
    Handoff,
    Message,
    Rejected,
    Resume,
    Resumed,
    Step,
)
from kvferry_engine.wire.packing import unpack_ids
from kvferry_server.engines.client import EngineClient, EngineState
from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.errors import ApiError, EngineFailedError
from kvferry_server.requests import EngineRequest, ModelView
from kvferry_server.routing.admission import QueueFullError, QueueLimits, admit
from kvferry_server.routing.chooser import Chooser
from kvferry_server.routing.generation import Attempt, AttemptLost, RunningRequest
from kvferry_server.routing.load_book import LoadBook
from kvferry_server.routing.placement import Cancellations, Placement, PlacementLimits
from kvferry_server.routing.resume import ResumeRecord, SequenceRecord, tokens_to_skip
from kvferry_server.routing.routes import Route, RouteTable, Row, rows_of
from kvferry_server.routing.stats import MoveCause, RoutingStats

logger = logging.getLogger(__name__)

DEADLINE_MARGIN_S = 5.0
"""An engine ends a request at its deadline; the router does so this much later, should the engine not."""


class Dispatcher:
    """Implements `requests.Gateway` and `engines.registry.EngineSubscriber`."""

    def __init__(
        self,
        *,
        registry: EngineRegistry,
        chooser: Chooser,
        load_book: LoadBook,
        stats: RoutingStats,
        queue_limits: QueueLimits,
        placement_limits: PlacementLimits,
        router_boot: str,
        clock: Callable[[], float],
        on_refused: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._chooser = chooser
        self._load_book = load_book
        self._stats = stats
        self._queue_limits = queue_limits
        self._router_boot = router_boot
        self._clock = clock
        self._on_refused = on_refused
        self._cancellations = Cancellations()
        self._placement = Placement(
            chooser=chooser,
            registry=registry,
            load_book=load_book,
            stats=stats,
            cancellations=self._cancellations,
            limits=placement_limits,
            clock=clock,
        )
        self._running: dict[str, RunningRequest] = {}
        self._routes = RouteTable()
        self._expiry: dict[str, asyncio.TimerHandle] = {}
        self._num_submitted = 0

    # --- Gateway ------------------------------------------------------------------------------------------------------

    def model(self) -> ModelView | None:
        return self._registry.model()

    async def submit(self, request: EngineRequest) -> RunningRequest:
        """Start a request; see `Gateway.submit`. Cancelling the call aborts the request."""
        engines = self._chooser.decoders()
        try:
            admit(engines, num_sequences=len(request.seeds), limits=self._queue_limits)
        except QueueFullError as error:
            self._stats.refusals[error.refusal] += 1
            self._on_refused(error.refusal)
            raise
        running = self._begin(request)
        try:
            await self._placement.place_new(running)
        except BaseException:
            await running.aclose()
            raise
        return running

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and are not over."""
        return len(self._running)

    def num_on(self, boot: str) -> int:
        """Sequences of this router on an engine."""
        return self._load_book.num_mine(boot)

    def abort(self, rids: Iterable[str] | None = None) -> list[str]:
        """End requests by the id their dialect gave them, None = all, with finish reason abort; returns those found."""
        wanted = None if rids is None else set(rids)
        found = [r for r in self._running.values() if wanted is None or r.record.request.rid in wanted]
        for running in found:
            still_open = running.record.open_sequences
            self._release(running)
            for sequence in still_open:
                running.deliver(sequence, [], finish=Finish(reason=FinishReason.ABORT))
        return [running.record.request.rid for running in found]

    async def close(self) -> None:
        """Abort everything that still runs."""
        movers = [running.mover for running in self._running.values() if running.mover is not None]
        self.abort()
        await asyncio.gather(*movers, return_exceptions=True)

    def _begin(self, request: EngineRequest) -> RunningRequest:
        self._num_submitted += 1
        # Clients may repeat ids, and several routers share an engine: on the wire every request has a name of its own.
        wire_rid = f"{request.rid}.{self._router_boot[:8]}.{self._num_submitted:x}"
        now = self._clock()
        running = RunningRequest(
            ResumeRecord(request, wire_rid),
            deadline_s=None if request.timeout_s is None else now + request.timeout_s,
            on_stop=self._stopped,
            on_close=self._release,
        )
        running.orphaned_s = now
        self._running[wire_rid] = running
        if request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._expiry[wire_rid] = loop.call_later(request.timeout_s + DEADLINE_MARGIN_S, self._expired, running)
        return running

    def _expired(self, running: RunningRequest) -> None:
        timeout_s = running.record.request.timeout_s
        self._fail(running, EngineFailedError(f"the request did not finish within its time of {timeout_s:g} s"))

    # --- the end of a request -----------------------------------------------------------------------------------------

    def _stopped(self, running: RunningRequest, sequence: SequenceRecord) -> None:
        abort = Abort(rid=running.record.wire_rid, indices=[sequence.index])
        for attempt in (running.current, running.pending):
            if attempt is not None and attempt.engine.boot == attempt.boot:
                attempt.engine.send(abort)
                self._routes.drop(attempt, sequence)
        if running.is_over:
            self._release(running)

    def _release(self, running: RunningRequest) -> None:
        """Forget a request: nothing of it stays here, and ABORT goes wherever it may still run. Safe to repeat."""
        rid = running.record.wire_rid
        if self._running.pop(rid, None) is None:
            return
        expiry = self._expiry.pop(rid, None)
        if expiry is not None:
            expiry.cancel()
        for attempt in (running.current, running.pending):
            if attempt is not None:
                self._detach(running, attempt, cancel=bool(running.record.open_sequences))
        running.current = running.pending = None
        if running.mover is not None and running.mover is not asyncio.current_task():
            running.mover.cancel()

    def _fail(self, running: RunningRequest, error: ApiError) -> None:
        if running.is_over:
            return
        self._stats.num_failed += 1
        logger.warning("request failed: request=%s error=%s", running.record.wire_rid, error.message)
        self._release(running)
        running.fail(error)

    def _detach(self, running: RunningRequest, attempt: Attempt, *, cancel: bool) -> None:
        """Stop listening to an attempt and, with `cancel`, stop it at the engine."""
        self._routes.drop(attempt)
        for boot in attempt.burdened:
            self._load_book.released(boot, running.record.wire_rid)
        if cancel:
            self._cancellations.cancel(attempt.engine, attempt.boot, running.record.wire_rid)

    def _abandon(self, running: RunningRequest, attempt: Attempt) -> None:
        """Give up the attempt that fed a request; from now on no engine runs it."""
        self._detach(running, attempt, cancel=True)
        running.current = None
        running.orphaned_s = self._clock()

    # --- EngineSubscriber: engines ------------------------------------------------------------------------------------

    def engine_up(self, engine: EngineClient, *, same_boot: bool) -> None:
        self._cancellations.settle(engine)
        self._load_book.reported(engine.boot, engine.load)
        if not same_boot:
            return
        for running in list(self._running.values()):
            if running.pending is not None and running.pending.boot == engine.boot:
                engine.send(running.pending.submit)
            if running.current is not None and running.current.boot == engine.boot:
                stopped = [sequence.index for sequence in running.record.sequences if sequence.stopped]
                if stopped:
                    engine.send(Abort(rid=running.record.wire_rid, indices=stopped))
                self._catch_up(running, running.current)

    def engine_lost(self, engine: EngineClient) -> None:
        """The same boot may be back within the grace: nothing moves yet."""

    def engine_dead(self, engine: EngineClient, boot: str, *, deliberate: bool) -> None:
        affected = [r for r in self._running.values() if boot in (_boot(r.current), _boot(r.pending))]
        for running in affected:
            if running.pending is not None and running.pending.boot == boot:
                running.pending.settle(AttemptLost(reason="gone" if deliberate else "died", died=not deliberate))
            if running.current is not None and running.current.boot == boot:
                self._orphaned(running, died=not deliberate)
        self._routes.forget(boot)
        self._load_book.forget(boot)

    def engine_changed(self, engine: EngineClient) -> None:
        if engine.state is not EngineState.SUSPECT:
            return
        for running in self._running.values():
            if running.pending is not None and running.pending.boot == engine.boot:
                running.pending.settle(AttemptLost(reason="suspect", died=False))

    def _orphaned(self, running: RunningRequest, *, died: bool) -> None:
        """The engine that fed the request is gone."""
        assert running.current is not None
        self._abandon(running, running.current)
        if running.mover is not None:
            return
        if died:
            self._died(running)
        else:
            self._move(running, MoveCause.HANDOFF)

    def _died(self, running: RunningRequest) -> None:
        if running.record.may_retry_after_death():
            self._move(running, MoveCause.DEATH)
        else:
            self._fail(running, EngineFailedError("two engines in a row ended while running this request"))

    # --- EngineSubscriber: messages -----------------------------------------------------------------------------------

    def engine_message(self, engine: EngineClient, body: Message) -> None:
        match body:
            case Step():
                self._step(engine, body)
            case Beat():
                if body.load is not None:
                    self._load_book.reported(engine.boot, body.load)
            case Accepted():
                self._accepted(engine, body)
            case Rejected():
                self._rejected(engine, body)
            case Resumed():
                self._resumed(engine, body)
            case Handoff():
                self._handed_off(engine, body)
            case _:
                pass

    def _accepted(self, engine: EngineClient, body: Accepted) -> None:
        running = self._running.get(body.rid)
        if running is None:
            return
        attempt = running.pending
        if attempt is None or attempt.boot != engine.boot or attempt.number != body.attempt:
            return
        if len(body.slots) != len(attempt.submit.sequences):
            attempt.settle(AttemptLost(reason="malformed", died=False))
            return
        previous = running.current
        if previous is not None:
            self._detach(running, previous, cancel=True)
        attempt.slots = body.slots
        running.activate(attempt)
        for boot in attempt.burdened:
            self._load_book.accepted(boot, body.rid)
        for submitted, slot in zip(attempt.submit.sequences, body.slots, strict=True):
            sequence = running.record.sequences[submitted.index]
            sequence.catching_up = False
            if sequence.is_open:
                self._routes.add(slot, Route(running, sequence, attempt))
        attempt.settle(body)

    def _rejected(self, engine: EngineClient, body: Rejected) -> None:
        running = self._running.get(body.rid)
        attempt = running.pending if running is not None else None
        if attempt is not None and attempt.boot == engine.boot and attempt.number == body.attempt:
            attempt.settle(body)

    def _step(self, engine: EngineClient, step: Step) -> None:
        if step.load is not None:
            self._load_book.reported(engine.boot, step.load)
        for row in rows_of(step):
            route = self._routes.get(engine.boot, row.slot)
            if route is None:
                self._stats.num_stray_rows += 1
            else:
                self._take(route, row)

    def _take(self, route: Route, row: Row) -> None:
        """Pass on what is new in a row; ask again for what is missing before it."""
        running, sequence = route.running, route.sequence
        if not sequence.is_open:
            return
        skip = tokens_to_skip(len(sequence.emitted), row.offset)
        if skip is None:
            if not sequence.catching_up:
                self._stats.num_gaps += 1
                self._catch_up(running, route.attempt, sequence)
            return
        ids, logprobs = row.ids, row.logprobs
        if skip:
            self._stats.num_duplicate_tokens += min(skip, len(ids))
            ids = ids[skip:]
            logprobs = logprobs[skip:] if logprobs is not None else None
        if not ids and row.finish is None and row.report is None:
            return
        running.record.emitted(sequence, ids, route.attempt.output_hash)
        running.deliver(
            sequence,
            ids,
            logprobs=logprobs,
            prompt_logprobs=row.prompt_logprobs,
            report=row.report,
            finish=row.finish,
        )
        if row.finish is not None:
            self._routes.drop(route.attempt, sequence)
            if running.is_over:
                self._release(running)

    # --- resume, hand-off, move ---------------------------------------------------------------------------------------

    def _catch_up(self, running: RunningRequest, attempt: Attempt, only: SequenceRecord | None = None) -> None:
        """Ask the engine for what was lost on the way; a request with log-probs is submitted again instead."""
        if running.record.wants_logprobs:
            if running.mover is None:
                self._abandon(running, attempt)
                self._move(running, MoveCause.RELINK)
            return
        for sequence in running.record.open_sequences if only is None else [only]:
            sequence.catching_up = True
            attempt.engine.send(
                Resume(
                    rid=running.record.wire_rid,
                    attempt=attempt.number,
                    index=sequence.index,
                    from_k=len(sequence.emitted),
                )
            )

    def _resumed(self, engine: EngineClient, body: Resumed) -> None:
        running = self._running.get(body.rid)
        attempt = running.current if running is not None else None
        if running is None or attempt is None or attempt.boot != engine.boot or attempt.number != body.attempt:
            return
        if not 0 <= body.index < len(running.record.sequences):
            return
        sequence = running.record.sequences[body.index]
        sequence.catching_up = False
        if not sequence.is_open:
            return
        if not body.known:
            if running.mover is None:
                self._abandon(running, attempt)
                self._move(running, MoveCause.FORGOTTEN)
            return
        self._stats.num_resumed_in_place += 1
        self._routes.drop(attempt, sequence)
        if body.slot not in attempt.slots:
            attempt.slots.append(body.slot)
        route = Route(running, sequence, attempt)
        self._routes.add(body.slot, route)
        self._take(route, Row(slot=body.slot, offset=body.from_k, ids=unpack_ids(body.token_ids), finish=body.finish))

    def _handed_off(self, engine: EngineClient, body: Handoff) -> None:
        running = self._running.get(body.rid)
        attempt = running.current if running is not None else None
        if running is None or attempt is None or attempt.boot != engine.boot or attempt.number != body.attempt:
            return
        if running.mover is None:
            self._move(running, MoveCause.HANDOFF, source=engine)

    def _move(self, running: RunningRequest, cause: MoveCause, *, source: EngineClient | None = None) -> None:
        self._stats.moves[cause] += 1
        logger.info("request moves: request=%s cause=%s", running.record.wire_rid, cause)
        running.mover = asyncio.create_task(self._moving(running, source))

    async def _moving(self, running: RunningRequest, source: EngineClient | None) -> None:
        try:
            await self._placement.place_again(running, source)
        except ApiError as error:
            self._fail(running, error)
        except Exception:
            logger.exception("request could not be moved: request=%s", running.record.wire_rid)
            self._fail(running, EngineFailedError("the request could not be moved to another engine"))
        finally:
            running.mover = None
            if running.current is None and self._running.get(running.record.wire_rid) is running:
                # The engine that accepted died before this task woke up.
                self._died(running)


def _boot(attempt: Attempt | None) -> str:
    return attempt.boot if attempt is not None else ""
