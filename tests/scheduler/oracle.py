"""A model small enough to be checked by hand: proves block tables, prefix sharing and fences by what the KV cache holds.

The KV of a position is a digest of the namespace and every token up to it, as attention would make it. `FakeRunner` reads the
digest before a row's first token from the row's own block table, so a wrong block gives wrong tokens; it also compares every
earlier position with what the tokens say. `expected_output` computes the same sequence without scheduler, blocks or steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.kv_cache.auditor import TransferClaim, audit
from kvferry_engine.kv_cache.block_pool import BlockPool
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.scheduler.config import SchedulerConfig
from kvferry_engine.scheduler.plan import PLACEHOLDER, SequenceUpdate, StepPlan, StepResult
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.wire.hashing import namespace_root
from kvferry_engine.wire.messages import Finish, FinishReason, Sampling
from kvferry_engine.wire.rng import mix64

MODULUS = (1 << 61) - 1
VOCABULARY = 23
UNWRITTEN = -1


def digest(parent: int, token: int) -> int:
    """KV of one position from the KV of the position before and the token."""
    return (parent * 1_000_003 + token + 1) % MODULUS


def root_digest(root: bytes) -> int:
    """What stands before the first position."""
    return int.from_bytes(root[:7], "little")


def next_token(kv: int, seed: int) -> int:
    """The token the model samples after a position with this KV."""
    return mix64(kv + seed) % VOCABULARY


def expected_output(
    prompt: list[int], sampling: Sampling, *, seed: int = 0, root: bytes | None = None, max_total: int = 1 << 30
) -> tuple[list[int], Finish]:
    """Output and finish of a prompt under the simple rules: EOS, stop ids, length."""
    kv = root_digest(namespace_root() if root is None else root)
    for token in prompt:
        kv = digest(kv, token)
    output: list[int] = []
    while True:
        token = next_token(kv, seed)
        kv = digest(kv, token)
        output.append(token)
        if len(output) >= sampling.min_tokens:
            if token in sampling.eos_token_ids:
                return output, Finish(reason=FinishReason.STOP)
            if token in sampling.stop_token_ids:
                return output, Finish(reason=FinishReason.STOP, stop_reason=token)
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_total:
            return output, Finish(reason=FinishReason.LENGTH)


def make_sequence(
    handle: int,
    prompt: list[int],
    *,
    sampling: Sampling | None = None,
    emitted: list[int] | None = None,
    upto: int = 0,
    leader: Sequence | None = None,
    priority: int = 0,
    arrival_s: float | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
    root: bytes | None = None,
) -> Sequence:
    """A sequence with arrival in handle order; `upto` > 0 makes it a PREFILL one."""
    emitted = emitted or []
    sampling = sampling or Sampling(max_tokens=8)
    known = [*prompt, *emitted]
    tokens = np.zeros(max(len(prompt) + sampling.max_tokens, len(known)) + 1, dtype=np.int32)
    tokens[: len(known)] = known
    return Sequence(
        rid=f"r{handle}",
        index=0,
        handle=handle,
        tokens=tokens,
        num_prompt=len(prompt),
        num_tokens=len(known),
        sampling=sampling,
        seed=seed,
        root=namespace_root() if root is None else root,
        purpose=Purpose.PREFILL if upto else Purpose.GENERATE,
        upto=upto,
        leader=leader,
        priority=priority,
        arrival_s=float(handle) if arrival_s is None else arrival_s,
        deadline_s=deadline_s,
    )


class FakeRunner:
    """Executes plans in launch order on `kv` [num_blocks, block_size]; eagerly at launch or as late as `collect` allows."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, is_eager: bool = True) -> None:
        self.kv = np.full((num_blocks, block_size), UNWRITTEN, dtype=np.int64)
        self.num_tokens = 0
        self._block_size = block_size
        self._last_sampled = np.full(num_slots, UNWRITTEN, dtype=np.int64)
        self._is_eager = is_eager
        self._launched: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Queue a step."""
        check_shape(plan)
        self._launched.append(plan)
        if self._is_eager:
            self._execute_oldest()

    def collect(self) -> StepResult:
        """The result of the oldest launched step."""
        if not self._results:
            self._execute_oldest()
        return self._results.popleft()

    def write_block(self, block: int, sequence: Sequence, position: int) -> None:
        """What a scatter does: the KV of one full block of known tokens, `position` counted in blocks."""
        chain = self.chain(sequence, (position + 1) * self._block_size)
        self.kv[block] = chain[position * self._block_size + 1 :]

    def chain(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Digest before the first position, then that of each position."""
        chain = [root_digest(sequence.root)]
        for token in sequence.tokens[:num_tokens].tolist():
            chain.append(digest(chain[-1], token))
        return chain

    def _execute_oldest(self) -> None:
        plan = self._launched.popleft()
        sampled = np.full(len(plan.sequences), -1, dtype=np.int64)
        offset = 0
        for row, sequence in enumerate(plan.sequences):
            start, count, slot = int(plan.starts[row]), int(plan.counts[row]), int(plan.slots[row])
            tokens = plan.token_ids[offset : offset + count].tolist()
            offset += count
            if tokens[-1] == PLACEHOLDER:
                tokens[-1] = int(self._last_sampled[slot])
            table = plan.block_tables[row]
            expected = self.chain(sequence, start)
            stored = [int(self.kv[table[p // self._block_size], p % self._block_size]) for p in range(start)]
            assert stored == expected[1:], (
                f"step {plan.number}: KV of sequence {sequence.handle} before {start} is wrong"
            )
            kv = expected[0] if start == 0 else stored[-1]
            for position, token in enumerate(tokens, start):
                kv = digest(kv, token)
                self.kv[table[position // self._block_size], position % self._block_size] = kv
            if plan.samples[row]:
                sampled[row] = self._last_sampled[slot] = next_token(kv, sequence.seed)
            self.num_tokens += count
        self._results.append(StepResult(token_ids=sampled))


def check_shape(plan: StepPlan) -> None:
    """A plan's own promises."""
    n = len(plan.sequences)
    assert n > 0
    assert len(set(plan.slots.tolist())) == n == len(plan.starts) == len(plan.counts) == len(plan.samples)
    assert plan.block_tables.shape[0] == n == len(plan.generations)
    assert plan.block_tables.dtype == plan.starts.dtype == plan.counts.dtype == plan.token_ids.dtype == np.int32
    assert int(plan.counts.sum()) == len(plan.token_ids)
    decodes = slice(0, plan.num_decode_rows)
    assert (plan.counts > 0).all() and (plan.counts[decodes] == 1).all() and plan.samples[decodes].all()
    for row, sequence in enumerate(plan.sequences):
        output_starts = int(plan.starts[row]) >= sequence.num_prompt
        is_decode = bool(plan.samples[row]) and plan.counts[row] == 1 and output_starts
        assert is_decode == (row < plan.num_decode_rows)
        assert plan.generations[row] == sequence.generation


class Engine:
    """Scheduler, pool and fake runner driven as the core drives them; collects outputs by handle."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_model_len: int = 4096,
        lookahead: int = 0,
        policy: SchedulingPolicy = SchedulingPolicy.FCFS,
        enable_prefix_caching: bool = True,
        is_eager: bool = True,
        claims: Callable[[], list[TransferClaim]] = list,
    ) -> None:
        config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            lookahead=lookahead,
        )
        self.pool = BlockPool(num_blocks, block_size)
        self.index = PrefixIndex()
        self.scheduler = Scheduler(config, self.pool, self.index)
        self.runner = FakeRunner(num_blocks, block_size, max_num_seqs, is_eager=is_eager)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.computed: dict[int, int] = {}
        self._claims = claims
        self._inflight: deque[StepPlan] = deque()

    @property
    def is_idle(self) -> bool:
        """Nothing to do and nothing in flight."""
        return not self._inflight and not self.scheduler.has_work

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, recording those that end at once."""
        for sequence in sequences:
            update = self.scheduler.add(sequence, self.now)
            self.note([] if update is None else [update])

    def turn(self) -> StepPlan | None:
        """One turn of the loop, audited; returns the plan it launched."""
        self.now += 1.0
        self.note(self.scheduler.expired(self.now))
        plan = self.scheduler.schedule(self.now)
        self.audit()
        if plan is not None:
            assert int(plan.counts.sum()) <= self.scheduler.config.max_num_batched_tokens
            self.plans.append(plan)
            self.runner.launch(plan)
            self._inflight.append(plan)
        if self._inflight and (plan is None or len(self._inflight) > self.scheduler.config.lookahead):
            oldest = self._inflight.popleft()
            self.note(self.scheduler.retire(oldest, self.runner.collect(), self.now))
            self.audit()
        return plan

    def run(self, *sequences: Sequence, max_turns: int = 5000) -> dict[int, list[int]]:
        """Queue sequences and turn until everything is done; returns the outputs."""
        self.add(*sequences)
        for _ in range(max_turns):
            if self.is_idle:
                break
            self.turn()
        assert self.is_idle, "no progress"
        return self.outputs

    def audit(self) -> None:
        """Fail on any block whose holders disagree with the ledger."""
        problems = audit(self.pool, self.index, self.scheduler.sequences.values(), self._claims())
        assert not problems, problems

    def note(self, updates: list[SequenceUpdate]) -> None:
        """Record what changed, checking that outputs arrive without gap or repeat."""
        for update in updates:
            sequence = update.sequence
            assert sequence.handle not in self.finishes, "news of a sequence that has ended"
            self.computed[sequence.handle] = update.num_computed
            if sequence.purpose is Purpose.GENERATE:
                emitted = sequence.num_tokens - sequence.num_prompt - len(update.token_ids)
                output = self.outputs.setdefault(
                    sequence.handle, sequence.ids(sequence.num_prompt, sequence.num_tokens).tolist()[:emitted]
                )
                assert update.offset == len(output)
                output.extend(update.token_ids)
            if update.finish is not None:
                self.finishes[sequence.handle] = update.finish
