"""Executes the scheduler's plans on rank 0: launch a step, collect its result later, never waiting for the device between.

On a CPU a launch computes at once. On a GPU it only enqueues: sampled ids stay on the device, where the next step picks up
the ones its plan marks as PLACEHOLDER, and travel to pinned memory behind an event that `collect` waits for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvferry_engine.config import LogprobsMode
from kvferry_engine.request import Sequence
from kvferry_engine.runner.batch import ForwardBatch, make_batch, num_prompt_logits
from kvferry_engine.runner.executor import ModelExecutor, StepTensors
from kvferry_engine.runner.ranks import RankGroup
from kvferry_engine.sampling.logprobs import token_logprobs
from kvferry_engine.scheduler.plan import StepPlan, StepResult
from kvferry_engine.wire.messages import TokenLogprobs

NAN_MESSAGE = "the model produced NaN logits for this sequence"
DEATH_GRACE_S = 2.0


class Sampler(Protocol):
    """Chooses tokens; `sampling.sampler` in an engine, something simpler in tests."""

    def sample(
        self, logits: Tensor, sequences: list[Sequence], positions: list[int], /
    ) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """Return ids int64 [n] on the device of logits fp32 [n, V], which may be changed, and log-probs by row that wants them.

        `positions[i]` is the index of the token to sample in prompt + output; it can be ahead of what the sequence knows.
        """
        ...

    def forget(self, handles: list[int]) -> None:
        """Drop state of sequences that ended."""


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A step on its way. `ids` and `is_bad` are on the host once `done` (None on a CPU) has passed."""

    num_rows: int
    sampled_rows: list[int]
    ids: Tensor | None
    is_bad: Tensor | None
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    done: torch.cuda.Event | None = None


class ModelRunner:
    """Rank 0's runner. Implements `core.Runner`."""

    def __init__(
        self,
        *,
        executor: ModelExecutor,
        sampler: Sampler,
        logprobs_mode: LogprobsMode,
        block_size: int,
        ranks: RankGroup | None = None,
    ) -> None:
        self._executor = executor
        self._sampler = sampler
        self._logprobs_mode = logprobs_mode
        self._block_size = block_size
        self._ranks = ranks
        self._launched: deque[_Launched] = deque()
        self._previous_ids: Tensor | None = None
        self._previous_rows: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises RankDiedError when a rank is gone."""
        batch = make_batch(plan, block_size=self._block_size, previous_rows=self._previous_rows)
        if self._ranks is None:
            self._launched.append(self._step(plan, batch))
            return
        self._ranks.run(batch)
        try:
            self._launched.append(self._step(plan, batch))
        except RuntimeError as error:
            death = self._ranks.death(DEATH_GRACE_S)
            raise death or error from error

    def collect(self) -> StepResult:
        """Return the result of the oldest launched step; blocks until it is there."""
        step = self._launched.popleft()
        if step.done is not None:
            step.done.synchronize()
        result = StepResult(token_ids=np.full(step.num_rows, -1, dtype=np.int64), prompt_logprobs=step.prompt_logprobs)
        if step.ids is None or step.is_bad is None:
            return result
        result.token_ids[step.sampled_rows] = step.ids.numpy()
        result.logprobs = {step.sampled_rows[index]: logprobs for index, logprobs in step.logprobs.items()}
        if bool(step.is_bad.any()):
            for index in step.is_bad.nonzero().flatten().tolist():
                row = step.sampled_rows[index]
                result.token_ids[row] = -1
                result.logprobs.pop(row, None)
                result.errors[row] = NAN_MESSAGE
        return result

    def forget(self, handles: list[int]) -> None:
        """Sequences that finished: the sampler drops what it kept for them."""
        self._sampler.forget(handles)

    def close(self) -> None:
        """Stop the other ranks. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    @torch.inference_mode()
    def _step(self, plan: StepPlan, batch: ForwardBatch) -> _Launched:
        hidden, tensors = self._executor.forward(batch, self._previous_ids)
        prompt_logprobs = self._prompt(plan, hidden, tensors) if len(batch.prompt_indices) else {}
        rows = np.flatnonzero(plan.samples).tolist()
        step = _Launched(
            num_rows=batch.num_rows,
            sampled_rows=rows,
            ids=None,
            is_bad=None,
            logprobs={},
            prompt_logprobs=prompt_logprobs,
        )
        self._previous_rows = {plan.sequences[row].handle: index for index, row in enumerate(rows)}
        logits = self._executor.sample_logits(hidden, tensors)
        if logits is None:
            return step
        # The maximum of a row is NaN exactly when one of its logits is; infinite ones are legal.
        is_bad = logits.amax(-1).isnan()
        if logits.device.type == "cpu" and bool(is_bad.any()):
            logits[is_bad] = 0.0
        positions = batch.seq_lens[rows].tolist()
        ids, step.logprobs = self._sampler.sample(logits, [plan.sequences[row] for row in rows], positions)
        self._previous_ids = self._executor.share_ids(ids)
        step.ids, step.is_bad, step.done = _to_host(ids, is_bad)
        return step

    def _prompt(self, plan: StepPlan, hidden: Tensor, tensors: StepTensors) -> dict[int, list[TokenLogprobs]]:
        """Compute the prompt log-probs of a plan, piece by piece of its logits."""
        rows = [row for row in range(len(plan.sequences)) for _ in range(num_prompt_logits(plan, row))]
        sequences = [plan.sequences[row] for row in rows]
        offsets = [offset for row in range(len(plan.sequences)) for offset in range(num_prompt_logits(plan, row))]
        targets = [
            int(s.tokens[plan.starts[row] + offset + 1])
            for s, row, offset in zip(sequences, rows, offsets, strict=True)
        ]
        wanted = [s.sampling.prompt_logprobs or 0 for s in sequences]
        result: dict[int, list[TokenLogprobs]] = {row: [] for row in rows}
        first = 0
        for logits in self._executor.prompt_logits(hidden, tensors):
            assert logits is not None
            stop = first + len(logits)
            computed = token_logprobs(logits, targets[first:stop], wanted[first:stop], mode=self._logprobs_mode)
            for row, logprobs in zip(rows[first:stop], computed, strict=True):
                result[row].append(logprobs)
            first = stop
        return result


def _to_host(ids: Tensor, is_bad: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
    if not ids.is_cuda:
        return ids, is_bad, None
    host_ids = torch.empty_like(ids, device="cpu", pin_memory=True)
    host_bad = torch.empty_like(is_bad, device="cpu", pin_memory=True)
    host_ids.copy_(ids, non_blocking=True)
    host_bad.copy_(is_bad, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
    done.record()
    return host_ids, host_bad, done
