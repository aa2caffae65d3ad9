"""The engine's loop: drain control, schedule, launch, retire, publish. Everything else is a part this loop drives.

The core is the same whether it serves routers over the wire (`control` feeds it) or a Python program in the same process
(`kvferry.LLM`). All methods run on one thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry_engine.errors import RequestError
from kvferry_engine.publisher import Publisher
from kvferry_engine.request import Sequence, Status
from kvferry_engine.sampling.validation import check_submit
from kvferry_engine.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.stats import EngineStats
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.hashing import namespace_root

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes plans; `collect` returns the result of the oldest launched one and blocks until it is there."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def forget(self, handles: list[int]) -> None:
        """Sequences that finished; state kept for them can go."""


class Transfer(Protocol):
    """The parts of the transfer service the loop calls; an engine without peers has `NoTransfer`."""

    @property
    def num_slots_in_use(self) -> int:
        """Staging slots with a payload."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """Measured rate of transfers into this engine; 0 while unknown."""
        ...

    def start_remote(self, sequence: Sequence, hints: list[wire.PrefillHint], *, force: bool, now: float) -> bool: ...

    def poll(self, now: float) -> None: ...

    def on_updates(self, updates: list[SequenceUpdate], now: float) -> None: ...

    def abort(self, sequence: Sequence, now: float) -> None: ...

    def report(self, sequence: Sequence, report: wire.PromptReport) -> None:
        """Add what the transfer knows (engine, bytes, seconds) to a prompt report."""

    def is_busy(self) -> bool:
        """True while transfers are under way, so that the idle wait stays short."""
        ...

    def next_timer_s(self, now: float) -> float | None: ...

    def close(self) -> None: ...


class NoTransfer:
    """An engine that never ferries: the SDK's single engine."""

    num_slots_in_use = 0
    bytes_per_s = 0.0

    def start_remote(self, sequence: Sequence, hints: list[wire.PrefillHint], *, force: bool, now: float) -> bool:
        return False

    def poll(self, now: float) -> None:
        return

    def on_updates(self, updates: list[SequenceUpdate], now: float) -> None:
        return

    def abort(self, sequence: Sequence, now: float) -> None:
        return

    def report(self, sequence: Sequence, report: wire.PromptReport) -> None:
        return

    def is_busy(self) -> bool:
        return False

    def next_timer_s(self, now: float) -> float | None:
        return None

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """What the core checks requests against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_queued: int
    lookahead: int


class EngineCore:
    """One model replica at work. `submit` and `abort` change what runs; `turn` advances it by at most one step."""

    def __init__(
        self,
        *,
        limits: CoreLimits,
        scheduler: Scheduler,
        runner: Runner,
        send: Callable[[str, wire.Step], None],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.transfer: Transfer = NoTransfer()
        self._runner = runner
        self._clock = clock
        self._publisher = Publisher(send=send, report=self._report)
        self._inflight: deque[tuple[StepPlan, float]] = deque()
        self._handles = itertools.count(1)
        self._by_rid: dict[str, list[Sequence]] = {}
        self._attempts: dict[str, int] = {}
        self._slots: dict[str, list[int]] = {}
        """All slots of a running request, ended sequences included."""
        self._local_reason: dict[int, str] = {}
        self.is_draining = False
        self.load = wire.Load()
        """As of the last turn; replaced, never changed, so that other threads may read it."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, origin: str, message: wire.Submit) -> wire.Accepted | wire.Rejected:
        """Start a request, or say why not. Idempotent on (rid, attempt); a newer attempt replaces an older one."""
        now = self._clock()
        attempt = self._attempts.get(message.rid)
        if attempt is not None and message.rid in self._by_rid:
            if attempt == message.attempt:
                return wire.Accepted(rid=message.rid, attempt=attempt, slots=self._slots[message.rid])
            if attempt > message.attempt:
                return self._rejected(
                    message, wire.RejectCode.STALE, f"attempt {attempt} of this request already runs here"
                )
            self.abort(message.rid, None)
        if self.is_draining:
            return self._rejected(message, wire.RejectCode.DRAINING, "this engine is draining")
        if message.grammar is not None or message.lora_digest:
            what = "structured output" if message.grammar is not None else "LoRA adapters"
            return self._rejected(message, wire.RejectCode.UNSUPPORTED, f"this engine does not support {what}")
        if self.scheduler.num_waiting + len(message.sequences) > self.limits.max_queued:
            return self._rejected(
                message, wire.RejectCode.BUSY, f"{self.scheduler.num_waiting} sequences wait already", retry_after_s=1.0
            )
        try:
            sequences = self._make_sequences(origin, message, now)
            updates = self._add_all(message, sequences, now)
        except RequestError as error:
            return self._rejected(message, wire.RejectCode.INVALID, str(error), param=error.param)
        slots = [sequence.handle for sequence in sequences]
        self._by_rid[message.rid] = sequences
        self._attempts[message.rid] = message.attempt
        self._slots[message.rid] = slots
        self._after(updates, now)
        return wire.Accepted(rid=message.rid, attempt=message.attempt, slots=slots)

    def abort(self, rid: str, indices: list[int] | None) -> None:
        """Stop sequences of a request; unknown ids are ignored. Their owner gets no further tokens."""
        now = self._clock()
        for sequence in list(self._by_rid.get(rid, ())):
            if indices is None or sequence.index in indices:
                self._abort_sequence(sequence, now)

    def abort_origin(self, origin: str) -> None:
        """Stop everything a vanished reader asked for."""
        for rid, sequences in list(self._by_rid.items()):
            if sequences[0].origin == origin:
                self.abort(rid, None)
        self._publisher.forget_origin(origin)

    def resume(self, origin: str, message: wire.Resume) -> wire.Resumed:
        """Say again what a sequence produced from `from_k` on; later tokens go to the asking connection."""
        candidates = [s for s in self._by_rid.get(message.rid, ()) if s.index == message.index]
        sequence = candidates[0] if candidates else self._publisher.recent(message.rid, message.index)
        answer = wire.Resumed(rid=message.rid, attempt=message.attempt, index=message.index, known=False)
        if sequence is None or self._attempts.get(message.rid, message.attempt) != message.attempt:
            return answer
        sequence.origin = origin
        first = sequence.num_prompt + message.from_k
        answer.known = True
        answer.slot = sequence.handle
        answer.from_k = message.from_k
        answer.token_ids = sequence.ids(first, sequence.num_tokens).astype("<i4").tobytes()
        answer.finish = sequence.finish
        return answer

    def requests(self) -> list[tuple[str, str, int]]:
        """(origin, rid, attempt) of everything that runs or waits."""
        return [(sequences[0].origin, rid, self._attempts[rid]) for rid, sequences in self._by_rid.items()]

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing in flight."""
        return not self._inflight and not self.scheduler.has_work

    # --- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Advance by at most one step; False when there was nothing to do."""
        now = self._clock()
        self.stats.turned(now)
        self.transfer.poll(now)
        self._after(self.scheduler.expired(now), now)
        plan = self.scheduler.schedule(now)
        # Which PREFILL sequences start is told before the step runs, so that receivers reserve room meanwhile.
        self._after(self.scheduler.drain_updates(), now)
        if plan is not None:
            self._runner.launch(plan)
            self._inflight.append((plan, now))
        if self._inflight and (plan is None or len(self._inflight) > self.limits.lookahead):
            self._retire()
        self.load = self.stats.load(self.scheduler, self.transfer)
        self._publisher.flush(self.load)
        self._publisher.expire(now)
        return plan is not None or bool(self._inflight) or self.scheduler.has_work

    def _retire(self) -> None:
        plan, launched_s = self._inflight.popleft()
        result = self._runner.collect()
        now = self._clock()
        updates = self.scheduler.retire(plan, result, now)
        self.stats.stepped(plan, launched_s, now)
        self._after(updates, now)

    def _after(self, updates: list[SequenceUpdate], now: float) -> None:
        """Tell everybody what changed; the one place where sequences end."""
        if not updates:
            return
        self.transfer.on_updates(updates, now)
        self._publisher.add(updates, now)
        self.stats.updated(updates)
        finished = [update.sequence for update in updates if update.finish is not None]
        for sequence in finished:
            self._forget(sequence)
        if finished:
            self._runner.forget([sequence.handle for sequence in finished])

    def _forget(self, sequence: Sequence) -> None:
        self._local_reason.pop(sequence.handle, None)
        siblings = self._by_rid.get(sequence.rid)
        if siblings is None or sequence not in siblings:
            return
        siblings.remove(sequence)
        if not siblings:
            del self._by_rid[sequence.rid]
            del self._attempts[sequence.rid]
            del self._slots[sequence.rid]

    def _abort_sequence(self, sequence: Sequence, now: float) -> None:
        if sequence.status is Status.REMOTE:
            self.transfer.abort(sequence, now)
        self.scheduler.abort(sequence.handle, "aborted")
        self._publisher.forget(sequence.handle)
        self._forget(sequence)
        self._runner.forget([sequence.handle])

    # --- helpers ----------------------------------------------------------------------------------------------------

    def next_handle(self) -> int:
        """A number for a sequence that others than `submit` make (PREFILL for another engine)."""
        return next(self._handles)

    def estimate_start_s(self) -> float:
        """Seconds until a prompt queued now would start, by the measured prefill rate; 0 while unknown."""
        rate = self.stats.prefill_tokens_per_s
        return self.scheduler.waiting_tokens / rate if rate > 0 else 0.0

    def _make_sequences(self, origin: str, message: wire.Submit, now: float) -> list[Sequence]:
        indices = {part.index for part in message.sequences}
        if not indices or len(indices) != len(message.sequences):
            raise RequestError("a request has at least one sequence, each with an index of its own", param="n")
        columns = (message.prompt_ids, *(part.emitted_ids for part in message.sequences))
        if any(len(column) % 4 for column in columns):
            raise RequestError("token ids travel as int32 columns, this one is torn", param="prompt")
        prompt = np.frombuffer(message.prompt_ids, dtype="<i4")
        limits = self.limits
        check_submit(
            message, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len, max_logprobs=limits.max_logprobs
        )
        root = namespace_root(message.lora_digest, message.cache_salt)
        capacity = min(len(prompt) + message.sampling.max_tokens, limits.max_model_len) + 1
        sequences: list[Sequence] = []
        for part in message.sequences:
            emitted = np.frombuffer(part.emitted_ids, dtype="<i4")
            tokens = np.zeros(max(capacity, len(prompt) + len(emitted) + 1), dtype=np.int32)
            tokens[: len(prompt)] = prompt
            tokens[len(prompt) : len(prompt) + len(emitted)] = emitted
            sequences.append(
                Sequence(
                    rid=message.rid,
                    index=part.index,
                    handle=next(self._handles),
                    tokens=tokens,
                    num_prompt=len(prompt),
                    num_tokens=len(prompt) + len(emitted),
                    sampling=message.sampling,
                    seed=part.seed,
                    root=root,
                    leader=sequences[0] if sequences else None,
                    priority=message.priority,
                    arrival_s=now,
                    deadline_s=None if message.remaining_s is None else now + message.remaining_s,
                    origin=origin,
                )
            )
        return sequences

    def _add_all(self, message: wire.Submit, sequences: list[Sequence], now: float) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        for position, sequence in enumerate(sequences):
            if position == 0 and self._start_remote(message, sequence, now):
                continue
            update = self.scheduler.add(sequence, now)
            if update is not None:
                updates.append(update)
        return updates

    def _start_remote(self, message: wire.Submit, sequence: Sequence, now: float) -> bool:
        self.scheduler.check(sequence)
        if message.sampling.prompt_logprobs is not None:
            self._local_reason[sequence.handle] = "prompt_logprobs"
            return False
        if not message.prefill_hints:
            self._local_reason[sequence.handle] = "no_hint"
            return False
        if self.transfer.start_remote(sequence, message.prefill_hints, force=message.force_remote, now=now):
            return True
        self._local_reason[sequence.handle] = "short_or_cached"
        return False

    def _rejected(
        self,
        message: wire.Submit,
        code: wire.RejectCode,
        text: str,
        *,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> wire.Rejected:
        return wire.Rejected(
            rid=message.rid, attempt=message.attempt, code=code, message=text, param=param, retry_after_s=retry_after_s
        )

    def _report(self, sequence: Sequence) -> wire.PromptReport:
        first = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else sequence.arrival_s
        token = sequence.first_token_s if sequence.first_token_s is not None else first
        report = wire.PromptReport(
            num_prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            remote_tokens=sequence.num_remote,
            local_reason="" if sequence.num_remote else self._local_reason.get(sequence.handle, "prefill_failed"),
            queue_s=max(first - sequence.arrival_s, 0.0),
            prefill_s=max(token - first, 0.0),
        )
        self.transfer.report(sequence, report)
        return report
