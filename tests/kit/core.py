"""A core over a runner that needs no model: the next token is a fixed function of seed, position and the token before."""

from __future__ import annotations

import numpy as np

from kvferry_engine.core import CoreLimits, EngineCore
from kvferry_engine.kv_cache.block_pool import BlockPool
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Sequence
from kvferry_engine.scheduler.config import SchedulerConfig
from kvferry_engine.scheduler.plan import StepPlan, StepResult
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.packing import pack_ids, unpack_ids
from kvferry_engine.wire.rng import mix64

VOCABULARY = 97
BLOCK_SIZE = 16


def next_token(seed: int, position: int, previous: int) -> int:
    """What the fake model samples at `position` (index in prompt + output)."""
    return mix64(seed * 1000003 + position * 101 + previous) % VOCABULARY


def expected_output(prompt: list[int], seed: int, count: int) -> list[int]:
    """The tokens an undisturbed request gets."""
    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(next_token(seed, position, tokens[-1]))
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements core.Runner; results are there at once."""

    def __init__(self) -> None:
        self._results: list[StepResult] = []
        self._sampled: dict[int, int] = {}
        self.forgotten: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        ids = np.full(len(plan.sequences), -1, dtype=np.int64)
        offset = 0
        for row, sequence in enumerate(plan.sequences):
            offset += int(plan.counts[row])
            if plan.samples[row]:
                ids[row] = self._sample(
                    sequence, int(plan.starts[row] + plan.counts[row]), int(plan.token_ids[offset - 1])
                )
        self._results.append(StepResult(token_ids=ids))

    def _sample(self, sequence: Sequence, position: int, previous: int) -> int:
        known = previous if previous >= 0 else self._sampled[sequence.handle]
        token = next_token(sequence.seed, position, known)
        self._sampled[sequence.handle] = token
        return token

    def collect(self) -> StepResult:
        return self._results.pop(0)

    def forget(self, handles: list[int]) -> None:
        self.forgotten += handles


class Bench:
    """A core with its clock, its runner and everything it sent, by origin."""

    def __init__(
        self, *, num_blocks: int = 32, lookahead: int = 0, max_queued: int = 64, max_model_len: int = 256
    ) -> None:
        self.now = 0.0
        self.index = PrefixIndex()
        pool = BlockPool(num_blocks, BLOCK_SIZE, on_evict=self.index.remove)
        config = SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=64, lookahead=lookahead
        )
        self.scheduler = Scheduler(config, pool, self.index)
        self.runner = FakeRunner()
        self.sent: list[tuple[str, wire.Step]] = []
        self.core = EngineCore(
            limits=CoreLimits(
                vocab_size=VOCABULARY,
                max_model_len=max_model_len,
                max_logprobs=20,
                max_queued=max_queued,
                lookahead=lookahead,
            ),
            scheduler=self.scheduler,
            runner=self.runner,
            send=lambda origin, step: self.sent.append((origin, step)),
            clock=lambda: self.now,
        )

    def submit(
        self,
        rid: str,
        prompt: list[int],
        count: int,
        *,
        origin: str = "router",
        attempt: int = 0,
        seeds: tuple[int, ...] = (1,),
        emitted: list[int] | None = None,
        remaining_s: float | None = None,
    ) -> wire.Accepted | wire.Rejected:
        sequences = [
            wire.SubmitSequence(index=i, seed=seed, emitted_ids=pack_ids(emitted or [])) for i, seed in enumerate(seeds)
        ]
        return self.core.submit(
            origin,
            wire.Submit(
                rid=rid,
                attempt=attempt,
                engine_boot="b",
                prompt_ids=pack_ids(prompt),
                sequences=sequences,
                sampling=wire.Sampling(max_tokens=count),
                remaining_s=remaining_s,
            ),
        )

    def run(self, turns: int = 1000) -> None:
        """Turn until idle."""
        for _ in range(turns):
            if not self.core.turn() and self.core.is_idle:
                return
        raise AssertionError(f"still busy after {turns} turns")

    def tokens(self, slot: int, origin: str = "router") -> tuple[list[int], wire.Finish | None]:
        """All tokens sent for a slot, offsets checked for gaps and repeats, and how it ended."""
        ids: list[int] = []
        finish = None
        for to, step in self.sent:
            if to != origin:
                continue
            start = 0
            all_ids = unpack_ids(step.token_ids)
            rows = zip(unpack_ids(step.slots), unpack_ids(step.counts), unpack_ids(step.offsets), strict=True)
            for row, count, offset in rows:
                if row == slot:
                    assert not ids or offset == self._first + len(ids), "a gap or a repeat"
                    if not ids:
                        self._first = offset
                    ids += all_ids[start : start + count]
                start += count
            finish = step.finished.get(slot, finish)
        return ids, finish
