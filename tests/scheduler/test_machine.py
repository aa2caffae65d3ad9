"""Random lives of an engine: after every step the ledger is sound, and in the end everybody got exactly the right tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.errors import RequestError
from kvferry_engine.kv_cache.auditor import TransferClaim
from kvferry_engine.kv_cache.block_pool import Owner
from kvferry_engine.request import Purpose, Sequence, Status
from kvferry_engine.wire.hashing import namespace_root
from kvferry_engine.wire.messages import FinishReason, Sampling
from scheduler.oracle import Engine, expected_output, make_sequence

BLOCK = 4
MAX_MODEL_LEN = 60
MAX_UNFINISHED = 12
MAX_WASTE = 20
"""Steps may compute this many times the tokens there are (preempted ones again), never for ever."""
BASES = [[(7 * i + 3 * base) % 23 for i in range(40)] for base in range(2)]
"""Prompts are prefixes of these plus a tail, so that they share blocks."""


@dataclass
class Fill:
    """A transfer into this engine; `scattering` are blocks being written while the loop goes on."""

    sequence: Sequence
    tid: int
    scattering: list[tuple[int, int]] = field(default_factory=list)
    """(block, position) under the transfer's own hold."""

    @property
    def num_committed(self) -> int:
        return self.sequence.num_computed // BLOCK


@dataclass
class Pin:
    """A transfer out of this engine: the pinned blocks must keep their content."""

    tid: int
    blocks: list[int]
    content: np.ndarray


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine through requests, transfers in and out, aborts, deadlines and cache resets."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.submitted: dict[int, Sequence] = {}
        self.fills: list[Fill] = []
        self.pins: list[Pin] = []
        self.next_handle = 1
        self.next_tid = 1_000_000

    @initialize(
        num_blocks=st.sampled_from([4, 8, 10, 12, 14, 18, 40]),
        budget=st.sampled_from([64, 16, 5, 3, 1]),
        max_num_seqs=st.sampled_from([6, 4, 2, 1]),
        lookahead=st.integers(0, 1),
        policy=st.sampled_from(SchedulingPolicy),
        caching=st.sampled_from([True, True, True, False]),
        is_eager=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        lookahead: int,
        policy: SchedulingPolicy,
        caching: bool,
        is_eager: bool,
    ) -> None:
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=BLOCK,
            budget=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            lookahead=lookahead,
            policy=policy,
            enable_prefix_caching=caching,
            is_eager=is_eager,
            claims=self.claims,
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.unfinished) < MAX_UNFINISHED)
    @rule(
        base=st.integers(0, 1),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 22), min_size=1, max_size=6),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        eos=st.sampled_from([[], [3, 4, 5]]),
        min_tokens=st.sampled_from([0, 3]),
        remaining=st.sampled_from([None, None, 5.0, 30.0]),
        resumed=st.sampled_from([0, 2, 6]),
        is_remote=st.booleans(),
        wants_prompt_logprobs=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        base: int,
        shared: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str,
        eos: list[int],
        min_tokens: int,
        remaining: float | None,
        resumed: int,
        is_remote: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        sampling = Sampling(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            eos_token_ids=eos,
            prompt_logprobs=0 if wants_prompt_logprobs else None,
        )
        self.start_request(
            BASES[base][:shared] + tail,
            sampling,
            n=n,
            priority=priority,
            root=namespace_root(cache_salt=salt),
            remaining=remaining,
            resumed=resumed,
            is_remote=is_remote and not wants_prompt_logprobs,
        )

    @rule(
        count=st.integers(2, 6), length=st.integers(1, 12), priority=st.integers(0, 2), max_tokens=st.integers(12, 30)
    )
    def submit_a_burst_of_long_outputs(self, count: int, length: int, priority: int, max_tokens: int) -> None:
        for number in range(count):
            prompt = [(number + position) % 23 for position in range(length)]
            self.start_request(prompt, Sampling(max_tokens=max_tokens), priority=(priority + number) % 3)

    @rule(base=st.integers(0, 1), length=st.integers(5, 32), is_granted=st.booleans())
    def submit_remote(self, base: int, length: int, is_granted: bool) -> None:
        self.start_request(BASES[base][:length], Sampling(max_tokens=5), is_remote=True)
        if is_granted and self.fills:
            self.reserve_for(self.fills[-1])
        self.running_engine.audit()

    @rule(base=st.integers(0, 1), num_blocks=st.integers(1, 9), priority=st.integers(0, 2))
    def prefill_for_another_engine(self, base: int, num_blocks: int, priority: int) -> None:
        engine = self.running_engine
        prompt = BASES[base][: num_blocks * BLOCK + 1]
        sequence = make_sequence(
            self.next_handle, prompt, upto=num_blocks * BLOCK, priority=priority, arrival_s=engine.now
        )
        self.next_handle += 1
        try:
            engine.add(sequence)
        except RequestError:
            assert sequence.upto > engine.pool.num_blocks * BLOCK
            return
        self.submitted[sequence.handle] = sequence

    @rule(data=st.data())
    @precondition(lambda self: self.unfinished)
    def abort(self, data: st.DataObject) -> None:
        engine = self.running_engine
        handle = data.draw(st.sampled_from(sorted(self.unfinished)))
        update = engine.scheduler.abort(handle, "client gone")
        assert update is not None
        engine.note([update])
        engine.audit()

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.running_engine.turn()

    @rule()
    def drop_prefix_cache(self) -> None:
        self.running_engine.scheduler.drop_prefix_cache()
        assert len(self.running_engine.index) == 0
        self.running_engine.audit()

    # --- transfers in -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.fills)
    def reserve(self, data: st.DataObject) -> None:
        self.reserve_for(data.draw(st.sampled_from(self.fills)))
        self.running_engine.audit()

    @rule(data=st.data(), turns=st.integers(0, 1))
    @precondition(lambda self: self.fills and self.unfinished)
    def scatter_into_what_an_abort_freed(self, data: st.DataObject, turns: int) -> None:
        fill = data.draw(st.sampled_from(self.fills))
        victim = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.turn(turns)
        engine = self.running_engine
        engine.note([update for update in [engine.scheduler.abort(victim, "client gone")] if update is not None])
        if self.reserve_for(fill):
            first = fill.num_committed + len(fill.scattering)
            fresh = [(block, position) for position, block in enumerate(fill.sequence.blocks) if position >= first]
            engine.pool.take([block for block, _ in fresh], Owner.RECV_RESERVED, fill.tid)
            fill.scattering += fresh
            self.complete_scatter(fill)
        engine.audit()

    @rule(data=st.data())
    @precondition(lambda self: self.fills)
    def start_scatter(self, data: st.DataObject) -> None:
        fill = data.draw(st.sampled_from(self.fills))
        first = fill.num_committed + len(fill.scattering)
        if fill.sequence.status is not Status.REMOTE or first >= len(fill.sequence.blocks):
            return
        block = fill.sequence.blocks[first]
        self.running_engine.pool.take([block], Owner.RECV_RESERVED, fill.tid)
        fill.scattering.append((block, first))
        self.running_engine.audit()

    @rule(data=st.data())
    @precondition(lambda self: self.fills)
    def end_scatter(self, data: st.DataObject) -> None:
        fill = data.draw(st.sampled_from(self.fills))
        self.complete_scatter(fill)
        if fill.sequence.status is Status.FINISHED:
            self.fills.remove(fill)
        self.running_engine.audit()

    @rule(data=st.data())
    @precondition(lambda self: self.fills)
    def end_fill(self, data: st.DataObject) -> None:
        fill = data.draw(st.sampled_from(self.fills))
        self.finish_fill(fill)
        self.running_engine.audit()

    # --- transfers out ----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.engine is not None and len(self.engine.index) > 0)
    def pin(self, data: st.DataObject) -> None:
        engine = self.running_engine
        blocks = data.draw(
            st.lists(st.sampled_from(sorted(b for _, b in engine.index.items())), min_size=1, unique=True)
        )
        pin = Pin(tid=self.new_tid(), blocks=blocks, content=engine.runner.kv[blocks].copy())
        engine.pool.take(blocks, Owner.SEND_PIN, pin.tid)
        self.pins.append(pin)
        engine.audit()

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def unpin(self, data: st.DataObject) -> None:
        self.release_pin(data.draw(st.sampled_from(self.pins)))
        self.running_engine.audit()

    # --- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.engine is None:
            return
        engine = self.engine
        for fill in list(self.fills):
            self.finish_fill(fill)
        for pin in list(self.pins):
            self.release_pin(pin)
        num_tokens = sum(len(sequence.tokens) for sequence in engine.scheduler.sequences.values())
        for _ in range(10 + MAX_WASTE * num_tokens):
            if engine.is_idle:
                break
            engine.turn()
        assert engine.is_idle and not engine.scheduler.sequences, "no progress"
        assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
        for handle, sequence in self.submitted.items():
            self.check_outcome(handle, sequence)

    def check_outcome(self, handle: int, sequence: Sequence) -> None:
        engine = self.running_engine
        finish = engine.finishes[handle]
        if sequence.purpose is Purpose.PREFILL:
            if finish.reason is FinishReason.STOP:
                assert engine.computed[handle] == sequence.upto
            return
        prompt = sequence.ids(0, sequence.num_prompt).tolist()
        expected, expected_finish = expected_output(
            prompt, sequence.sampling, seed=sequence.seed, root=sequence.root, max_total=self.max_total
        )
        output = engine.outputs[handle]
        if finish.reason is FinishReason.ABORT:
            assert output == expected[: len(output)]
        else:
            assert (output, finish) == (expected, expected_finish)

    # --- parts ------------------------------------------------------------------------------------------------------

    def start_request(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        root: bytes | None = None,
        remaining: float | None = None,
        resumed: int = 0,
        is_remote: bool = False,
    ) -> None:
        """Submit n siblings as the core does; the first may be filled from another engine."""
        engine = self.running_engine
        leader: Sequence | None = None
        for index in range(n):
            seed = self.next_handle
            expected, _ = expected_output(prompt, sampling, seed=seed, root=root, max_total=self.max_total)
            sequence = make_sequence(
                self.next_handle,
                prompt,
                sampling=sampling,
                emitted=expected[:resumed],
                leader=leader,
                priority=priority,
                arrival_s=engine.now,
                deadline_s=None if remaining is None else engine.now + remaining,
                seed=seed,
                root=root,
            )
            self.next_handle += 1
            try:
                if is_remote and index == 0:
                    engine.scheduler.attach_prefix(sequence)
                    self.fills.append(Fill(sequence=sequence, tid=self.new_tid()))
                else:
                    engine.add(sequence)
            except RequestError:
                assert len(prompt) > engine.pool.num_blocks * BLOCK
                return
            self.submitted[sequence.handle] = sequence
            leader = leader or sequence
        engine.audit()

    def reserve_for(self, fill: Fill) -> list[int] | None:
        wanted = (fill.sequence.num_prompt - 1) // BLOCK
        before = len(fill.sequence.blocks)
        blocks = self.running_engine.scheduler.reserve_remote(fill.sequence, wanted)
        assert blocks is None or len(blocks) == max(wanted - before, 0)
        return blocks

    @property
    def running_engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @property
    def unfinished(self) -> list[int]:
        return [] if self.engine is None else list(self.engine.scheduler.sequences)

    @property
    def max_total(self) -> int:
        return min(MAX_MODEL_LEN, self.running_engine.pool.num_blocks * BLOCK + 1)

    def new_tid(self) -> int:
        self.next_tid += 1
        return self.next_tid

    def claims(self) -> list[TransferClaim]:
        scattering = [
            TransferClaim(owner=Owner.RECV_RESERVED, owner_id=fill.tid, blocks=[block for block, _ in fill.scattering])
            for fill in self.fills
        ]
        return scattering + [TransferClaim(owner=Owner.SEND_PIN, owner_id=p.tid, blocks=p.blocks) for p in self.pins]

    def complete_scatter(self, fill: Fill) -> None:
        """The write lands, whether or not the sequence still lives; only then is the block let go."""
        engine = self.running_engine
        for block, position in fill.scattering:
            engine.runner.write_block(block, fill.sequence, position)
        done = fill.num_committed + len(fill.scattering)
        if fill.scattering:
            engine.scheduler.commit_remote(fill.sequence, done)
            engine.pool.release([block for block, _ in fill.scattering], fill.tid)
            fill.scattering = []

    def finish_fill(self, fill: Fill) -> None:
        self.complete_scatter(fill)
        self.running_engine.scheduler.finish_remote(fill.sequence, self.running_engine.now)
        self.fills.remove(fill)

    def release_pin(self, pin: Pin) -> None:
        engine = self.running_engine
        assert np.array_equal(engine.runner.kv[pin.blocks], pin.content), "a pinned block changed while it was sent"
        engine.pool.release(pin.blocks, pin.tid)
        self.pins.remove(pin)


def run_machine(max_examples: int, step_count: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=step_count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
        ),
    )


def test_random_lives_leak_nothing_and_end_with_the_right_tokens() -> None:
    run_machine(max_examples=15, step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_lives_leak_nothing_and_end_with_the_right_tokens() -> None:
    run_machine(max_examples=240, step_count=50)
