"""Adversarial schedules: messages, payloads, steps, deaths, faults and time in any order; nothing leaks, everything ends.

Real receiver and sender machines, pairs, credits, scheduler and ledger; hypothesis decides what happens next. Every engine
decodes and prefills at once.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry_engine.request import Sequence
from kvferry_engine.transfer.protocol.receiver import OVER
from transfer.simulation import Engine, Layout, Network
from transfer.wires import LocalWires

MAX_LIVE = 6
choose = st.integers(0, 1 << 16)
rarely = st.integers(0, 5).map(lambda value: value == 5)


class TransferMachine(RuleBasedStateMachine):
    """A few engines with tiny pools, and everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(LocalWires(is_manual=True), layout=Layout(num_layers=2, num_kv_heads=2, head_dim=4))
        self.hub = self.network.wires.hub
        self.live: list[tuple[Engine, Sequence]] = []
        self.num_boots = 0
        self.shapes: list[tuple[int, int, int]] = []

    @initialize(
        shapes=st.lists(
            st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
            min_size=2,
            max_size=3,
        )
    )
    def begin(self, shapes: list[tuple[int, int, int]]) -> None:
        for shape in shapes:
            self.add_engine(shape)

    def add_engine(self, shape: tuple[int, int, int]) -> None:
        tensor_parallel, num_slots, slot_share = shape
        self.num_boots += 1
        self.network.add(
            f"e{self.num_boots}x",
            tensor_parallel=tensor_parallel,
            num_blocks=14,
            num_receive_slots=num_slots,
            num_send_slots=2,
            slot_bytes=2 * self.network.layout.block_bytes // slot_share,
            max_batched_tokens=32,
        )
        self.shapes.append(shape)

    def engine(self, choice: int) -> Engine:
        return list(self.network.engines.values())[choice % len(self.network.engines)]

    # --- what happens -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        choice=choose,
        prompt=st.integers(0, 4),
        length=st.integers(17, 150),
        order=st.permutations(range(3)),
        force=st.booleans(),
    )
    def submit(self, choice: int, prompt: int, length: int, order: list[int], force: bool) -> None:
        engine = self.engine(choice)
        boots = list(self.network.engines)
        hints = [boots[index] for index in order if index < len(boots)]
        ids = torch.randint(0, 90, (160,), generator=torch.Generator().manual_seed(prompt)).tolist()[:length]
        self.live.append((engine, engine.submit(ids, hints, force=force, max_tokens=2)))

    @precondition(lambda self: self.network.queues)
    @rule(choice=choose)
    def deliver_message(self, choice: int) -> None:
        keys = list(self.network.queues)
        self.network.deliver(*keys[choice % len(keys)])

    @precondition(lambda self: self.network.queues)
    @rule()
    def deliver_messages(self) -> None:
        self.network.deliver_all()

    @precondition(lambda self: self.network.dials)
    @rule()
    def connect(self) -> None:
        self.network.connect()

    @precondition(lambda self: self.hub.deliverable())
    @rule(choice=choose)
    def deliver_payload(self, choice: int) -> None:
        payloads = self.hub.deliverable()
        self.hub.deliver(*payloads[choice % len(payloads)])

    @rule(choice=choose)
    def turn(self, choice: int) -> None:
        self.engine(choice).turn()

    @rule(rounds=st.integers(1, 4))
    def bustle(self, rounds: int) -> None:
        """Control and computing go on everywhere; payloads wait."""
        for _ in range(rounds):
            self.network.deliver_all()
            for engine in self.network.engines.values():
                engine.turn()
            self.network.advance(0.01)

    @precondition(lambda self: self.hub.deliverable())
    @rule()
    def deliver_payloads(self) -> None:
        for prefix, pair_seq in self.hub.deliverable():
            self.hub.deliver(prefix, pair_seq)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.6, 0.6, 2.5, 12.0]))
    def advance(self, seconds: float) -> None:
        self.network.advance(seconds)

    @precondition(lambda self: self.live)
    @rule(choice=choose)
    def abort(self, choice: int) -> None:
        engine, sequence = self.live.pop(choice % len(self.live))
        if engine.boot in self.network.engines:
            engine.abort(sequence)

    # --- what goes wrong --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.hub.deliverable())
    @rule(choice=choose)
    def lose_payload(self, choice: int) -> None:
        payloads = self.hub.deliverable()
        self.hub.faults.dropped.add(payloads[choice % len(payloads)])

    @precondition(lambda self: self.hub.deliverable())
    @rule(choice=choose)
    def damage_payload(self, choice: int) -> None:
        payloads = self.hub.deliverable()
        self.hub.faults.corrupted.add(payloads[choice % len(payloads)])

    @precondition(lambda self: self.network.connected)
    @rule(choice=choose, is_rare=rarely)
    def disconnect(self, choice: int, is_rare: bool) -> None:
        if not is_rare:
            return
        pairs = sorted(sorted(pair) for pair in self.network.connected)
        one, other = pairs[choice % len(pairs)]
        self.network.disconnect(one, other)

    @rule(choice=choose, is_rare=rarely)
    def restart(self, choice: int, is_rare: bool) -> None:
        if not is_rare:
            return
        engine = self.engine(choice)
        self.network.kill(engine.boot)
        self.live = [(its, sequence) for its, sequence in self.live if its is not engine]
        self.add_engine(self.shapes[choice % len(self.shapes)])

    @rule(choice=choose, is_rare=rarely)
    def forget_cache(self, choice: int, is_rare: bool) -> None:
        if not is_rare:
            return
        self.engine(choice).scheduler.drop_prefix_cache()

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def ledgers_agree(self) -> None:
        self.live = [(engine, sequence) for engine, sequence in self.live if sequence.finish is None]
        for engine in self.network.engines.values():
            engine.audit()
            inbound = engine.service._receiving.inbound
            for rank, pool in enumerate(inbound._pools):
                num_used = sum(1 for pair, _ in inbound._payloads if pair.d_rank == rank)
                assert sum(pool._used.values()) == num_used
                assert len(inbound._free_slots[rank]) + num_used == pool.num_slots
                assert pool.num_free >= 0
            for entry in engine.service._receiving._entries.values():
                assert entry.receiver.state not in OVER

    def teardown(self) -> None:
        """However it got here, everything ends and nothing is left."""
        if self.network.engines:
            self.network.run(
                lambda: (
                    not self.network.queues
                    and not self.network.dials
                    and not any(self.network._is_busy(engine) for engine in self.network.engines.values())
                ),
                step_s=0.05,
                max_turns=4000,
            )
            for engine in self.network.engines.values():
                engine.assert_idle()


def explore(*, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        TransferMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_nothing_leaks_in_short_adversarial_runs() -> None:
    explore(max_examples=15, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_leaks_in_ten_thousand_adversarial_steps() -> None:
    explore(max_examples=150, steps=120)
