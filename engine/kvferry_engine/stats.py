"""What an engine measures about itself: totals for metrics, moving averages for the router's estimates.

Pure bookkeeping; the clock is passed in.
"""

from __future__ import annotations

from typing import Protocol

from kvferry_engine.request import Purpose
from kvferry_engine.scheduler.plan import SequenceUpdate, StepPlan
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.wire.messages import Counters, Load

SMOOTHING = 0.2
"""Weight of the newest sample in the exponential averages."""


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)


class TransferLoad(Protocol):
    """What the load message tells of transfers."""

    @property
    def num_slots_in_use(self) -> int: ...

    @property
    def bytes_per_s(self) -> float: ...


class EngineStats:
    """Totals since boot and averages of the recent past."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.last_turn_s = 0.0
        self._last_retired_s = 0.0

    def turned(self, now: float) -> None:
        """Note one turn of the loop (the heartbeat behind /health)."""
        self.last_turn_s = now

    def stepped(self, plan: StepPlan, launched_s: float, retired_s: float) -> None:
        """Note one retired step and how long it took."""
        # With lookahead a step waits in line behind the one before it.
        elapsed = max(retired_s - max(launched_s, self._last_retired_s), 1e-6)
        self._last_retired_s = retired_s
        self.counters.steps += 1
        num_tokens = int(plan.counts.sum())
        prompt_tokens = num_tokens - plan.num_decode_rows
        self.counters.prompt_tokens_local_compute += prompt_tokens
        if prompt_tokens >= 32 and prompt_tokens * 2 >= num_tokens:
            self.prefill_tokens_per_s = _mix(self.prefill_tokens_per_s, prompt_tokens / elapsed)
        elif prompt_tokens == 0:
            self.decode_step_s = _mix(self.decode_step_s, elapsed)

    def updated(self, updates: list[SequenceUpdate]) -> None:
        """Note new tokens and first tokens."""
        counters = self.counters
        for update in updates:
            sequence = update.sequence
            if sequence.purpose is Purpose.PREFILL:
                continue
            counters.generation_tokens += len(update.token_ids)
            if update.token_ids and update.offset == 0:
                counters.prompt_tokens += sequence.num_prompt
                counters.prompt_tokens_local_cache += sequence.num_cached
                counters.prompt_tokens_remote += sequence.num_remote

    def load(self, scheduler: Scheduler, transfer: TransferLoad) -> Load:
        """The load as of the last turn."""
        pool = scheduler.pool
        self.counters.preemptions = scheduler.num_preemptions
        self.counters.prefix_queries = scheduler.prefix_queries
        self.counters.prefix_hits = scheduler.prefix_hits
        return Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=pool.num_free,
            used_blocks=pool.num_blocks - pool.num_free,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            transfer_bytes_per_s=transfer.bytes_per_s,
            staging_slots_used=transfer.num_slots_in_use,
        )
