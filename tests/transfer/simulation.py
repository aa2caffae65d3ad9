"""Several engines in one process: real scheduler, ledger and transfer service; a model that writes known KV into the cache.

The KV of a block is a random tensor seeded by the block's hash, so whatever path a block took, its bytes can be checked. Messages
wait in queues until they are delivered; the wire is `LocalHub` (deterministic) or real gloo pairs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from kvferry_engine.kv_cache.auditor import audit
from kvferry_engine.kv_cache.block_pool import BlockPool
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Sequence, Status
from kvferry_engine.scheduler.config import SchedulerConfig
from kvferry_engine.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.transfer.commands import decode_command, encode_events
from kvferry_engine.transfer.ports import TransferContext, TransferSettings
from kvferry_engine.transfer.protocol.actions import TransferTimes
from kvferry_engine.transfer.protocol.slices import DTYPE_BYTES, heads_of_rank
from kvferry_engine.transfer.rank_worker import RankWorker
from kvferry_engine.transfer.ranks import Ranks
from kvferry_engine.transfer.service import TransferService
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.hashing import chain_hashes, namespace_root
from transfer.wires import Fault, FaultyConnector, GlooWires, LocalWires, Wires

ROOT = namespace_root()
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """Shape of the simulated model's cache."""

    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 16
    dtype: str = "float32"

    def wire(self) -> wire.KVLayout:
        return wire.KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
        )

    @property
    def block_bytes(self) -> int:
        """All layers and heads of one block."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]


@lru_cache(maxsize=4096)
def block_content(layout: Layout, block_hash: bytes) -> torch.Tensor:
    """KV of the block with this hash. [layers, 2, heads, slots, dim]"""
    generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:7], "little"))
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[layout.dtype])


@dataclass(eq=False)
class Engine:
    """One engine of the simulation."""

    boot: str
    network: Network
    layout: Layout
    tensor_parallel: int
    num_blocks: int
    settings: TransferSettings
    hello: wire.Hello
    max_batched_tokens: int = 48
    has_remote_ranks: bool = False
    """Ranks above 0 get their commands encoded and answer once a turn, as ranks in other processes do."""
    estimate_start_s: float = 0.0
    is_paused: bool = False
    faults: dict[int, Fault] = field(default_factory=dict)
    """What goes wrong with sends, by pair_seq."""
    results: dict[int, wire.Finish] = field(default_factory=dict)
    checked_blocks: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.layout.block_size)
        self.index = PrefixIndex()
        config = SchedulerConfig(
            max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=self.max_batched_tokens, lookahead=0
        )
        self.scheduler = Scheduler(config, self.pool, self.index)
        self.counters = wire.Counters()
        self.storages = []
        self.workers = {}
        for rank in range(self.tensor_parallel):
            first, last = heads_of_rank(rank, self.tensor_parallel, self.layout.num_kv_heads)
            shape = (
                self.layout.num_layers,
                self.num_blocks,
                2,
                last - first,
                self.layout.block_size,
                self.layout.head_dim,
            )
            self.storages.append(torch.full(shape, float("nan"), dtype=TORCH_DTYPES[self.layout.dtype]))
            self.workers[rank] = RankWorker(
                storage=self.storages[rank],
                num_receive_slots=self.settings.num_receive_slots,
                num_send_slots=self.settings.num_send_slots,
                slot_bytes=self.settings.slot_bytes,
                connectors={
                    name: FaultyConnector(connector, self.faults)
                    for name, connector in self.network.wires.connectors(self.boot).items()
                },
                wake=self.network.wake.set,
            )
        here = {0: self.workers[0]} if self.has_remote_ranks else self.workers
        self.ranks = Ranks(
            here,
            num_ranks=self.tensor_parallel,
            forward=lambda rank, data: self.workers[rank].execute(decode_command(data)),
        )
        self._handles = itertools.count(1)
        context = TransferContext(
            settings=self.settings,
            link=_Link(self.network, self.boot),
            scheduler=self.scheduler,
            index=self.index,
            ranks=self.ranks,
            next_handle=lambda: next(self._handles),
            estimate_start_s=lambda: self.estimate_start_s,
            counters=self.counters,
        )
        self.service = TransferService(context, clock=lambda: self.network.now)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        ids: list[int],
        prefill: list[str],
        *,
        force: bool = True,
        max_tokens: int = 1,
        deadline_s: float | None = None,
    ) -> Sequence:
        """Queue a request, ferried from engines `prefill` if the service wants that."""
        tokens = np.zeros(len(ids) + max_tokens + 1, dtype=np.int32)
        tokens[: len(ids)] = ids
        sequence = Sequence(
            rid=f"r{len(self.results)}",
            index=0,
            handle=next(self._handles),
            tokens=tokens,
            num_prompt=len(ids),
            num_tokens=len(ids),
            sampling=wire.Sampling(max_tokens=max_tokens),
            seed=0,
            root=ROOT,
            arrival_s=self.network.now,
            deadline_s=None if deadline_s is None else self.network.now + deadline_s,
        )
        hints = [wire.PrefillHint(address=f"addr-{boot}", boot=boot) for boot in prefill]
        if not self.service.start_remote(sequence, hints, force=force, now=self.network.now):
            self.scheduler.add(sequence, self.network.now)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        if sequence.status is Status.REMOTE:
            self.service.abort(sequence, self.network.now)
        update = self.scheduler.abort(sequence.handle, "aborted")
        if update is not None:
            self._take([update])

    # --- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """What the core does; False when it had nothing to compute."""
        now = self.network.now
        for rank, worker in self.workers.items():
            if rank and self.has_remote_ranks and (events := worker.drain()):
                self.ranks.deliver(rank, encode_events(events))
        self.service.poll(now)
        self._take(self.scheduler.expired(now))
        plan = self.scheduler.schedule(now)
        self._take(self.scheduler.drain_updates())
        if plan is None:
            return False
        result = self._compute(plan)
        self._take(self.scheduler.retire(plan, result, now))
        return True

    def _take(self, updates: list[SequenceUpdate]) -> None:
        if not updates:
            return
        self.service.on_updates(updates, self.network.now)
        for update in updates:
            if update.finish is not None:
                self.results[update.sequence.handle] = update.finish

    def _compute(self, plan: StepPlan) -> StepResult:
        size = self.layout.block_size
        for row, sequence in enumerate(plan.sequences):
            start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.counts[row])
            hashes = chain_hashes(sequence.ids(0, stop).astype("<i4").tobytes(), size, ROOT)
            for position in range(stop // size):
                content = block_content(self.layout, hashes[position])
                if (position + 1) * size > start:
                    self._write(sequence.blocks[position], content)
                else:
                    self._check(sequence.blocks[position], content, f"{self.boot} {sequence.rid} block {position}")
        ids = np.where(plan.samples, 7, -1).astype(np.int64)
        return StepResult(token_ids=ids)

    def _heads(self, rank: int) -> slice:
        return slice(*heads_of_rank(rank, self.tensor_parallel, self.layout.num_kv_heads))

    def _write(self, block: int, content: torch.Tensor) -> None:
        for rank, storage in enumerate(self.storages):
            storage[:, block] = content[:, :, self._heads(rank)]

    def _check(self, block: int, content: torch.Tensor, name: str) -> None:
        self.checked_blocks += 1
        for rank, storage in enumerate(self.storages):
            assert torch.equal(storage[:, block], content[:, :, self._heads(rank)]), f"{name}: wrong bytes"

    # --- checks -----------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every block has exactly the holders the parts claim, and indexed ones hold what their hash says."""
        problems = audit(self.pool, self.index, self.scheduler.sequences.values(), self.service.claims())
        assert not problems, (self.boot, problems)

    def check_cache(self) -> None:
        for block_hash, block in self.index.items():
            self._check(block, block_content(self.layout, block_hash), f"{self.boot} cached block {block}")

    def assert_idle(self) -> None:
        """Nothing is left of any transfer."""
        assert not self.service.is_busy(), self.boot
        inbound = self.service._receiving.inbound
        assert inbound.num_free_slots == self.settings.num_receive_slots * self.tensor_parallel
        free = sum(len(slots) for slots in self.service._sending.outbound._free_slots)
        assert free == self.settings.num_send_slots * self.tensor_parallel
        for pool in inbound._pools:
            assert not pool._used
        assert not self.scheduler.sequences
        assert int(self.pool.ref.sum()) == 0
        self.audit()
        self.check_cache()


@dataclass
class _Link:
    network: Network
    boot: str

    def send(self, boot: str, message: wire.Body) -> None:
        self.network.post(self.boot, boot, message)

    def connect(self, address: str) -> None:
        self.network.dial(self.boot, address)


class Network:
    """Engines, their control connections and the clock."""

    def __init__(self, wires: Wires, *, layout: Layout | None = None, times: TransferTimes | None = None) -> None:
        self.wires = wires
        self.layout = layout or Layout()
        self.times = times or TransferTimes()
        self.engines: dict[str, Engine] = {}
        self.is_real = isinstance(wires, GlooWires)
        self.wake = threading.Event()
        self.queues: dict[tuple[str, str], deque[wire.Body | None]] = {}
        self.connected: set[frozenset[str]] = set()
        self.dials: deque[tuple[str, str]] = deque()
        self.history: list[tuple[str, str, wire.Body]] = []
        self.tamper: Callable[[str, str, wire.Body], wire.Body | None] = lambda src, dst, message: message
        self._now = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() if self.is_real else self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def add(
        self,
        boot: str,
        *,
        tensor_parallel: int = 1,
        num_blocks: int = 64,
        num_receive_slots: int = 4,
        num_send_slots: int = 2,
        slot_bytes: int | None = None,
        pair_hash: str = "same",
        max_batched_tokens: int = 48,
        has_remote_ranks: bool = False,
    ) -> Engine:
        layout = self.layout.wire()
        settings = TransferSettings(
            boot=boot,
            store_address=self.wires.store_address(boot),
            address=f"addr-{boot}",
            layout=layout,
            tensor_parallel=tensor_parallel,
            pair_hash=pair_hash,
            transports=self.wires.transports,
            num_receive_slots=num_receive_slots,
            num_send_slots=num_send_slots,
            slot_bytes=slot_bytes or 2 * self.layout.block_bytes,
            min_remote_tokens=2 * self.layout.block_size,
            times=self.times,
        )
        model = wire.ModelInfo(
            names=["m"],
            root="m",
            max_model_len=4096,
            vocab_size=100,
            tasks=["generate"],
            dtype=self.layout.dtype,
            layout=layout,
            num_blocks=num_blocks,
            max_num_seqs=32,
            max_num_batched_tokens=max_batched_tokens,
            tensor_parallel=tensor_parallel,
            weights_id="w",
            pair_hash=pair_hash,
            output_hash="o",
            assets_digest="a",
            assets_bytes=0,
        )
        hello = wire.Hello(
            kind=wire.PeerKind.ENGINE, boot=boot, name=f"name-{boot}", address=f"addr-{boot}", model=model
        )
        engine = Engine(
            boot=boot,
            network=self,
            layout=self.layout,
            tensor_parallel=tensor_parallel,
            num_blocks=num_blocks,
            settings=settings,
            hello=hello,
            max_batched_tokens=max_batched_tokens,
            has_remote_ranks=has_remote_ranks,
        )
        self.engines[boot] = engine
        return engine

    # --- control ----------------------------------------------------------------------------------------------------

    def post(self, src: str, dst: str, message: wire.Body) -> None:
        if frozenset((src, dst)) in self.connected:
            self.queues.setdefault((src, dst), deque()).append(message)

    def dial(self, src: str, address: str) -> None:
        self.dials.append((src, address.removeprefix("addr-")))

    def connect(self) -> None:
        """Answer the oldest dial."""
        src, dst = self.dials.popleft()
        if src in self.engines and dst in self.engines and frozenset((src, dst)) not in self.connected:
            self.connected.add(frozenset((src, dst)))
            self.engines[dst].service.peer_up(src, self.engines[src].hello, "")
            self.engines[src].service.peer_up(dst, self.engines[dst].hello, f"addr-{dst}")

    def disconnect(self, one: str, other: str) -> None:
        """The control connection breaks: both ends notice, queued messages are lost."""
        self.connected.discard(frozenset((one, other)))
        for src, dst in ((one, other), (other, one)):
            self.queues.pop((src, dst), None)
            if dst in self.engines:
                self.engines[dst].service.peer_down(src)

    def kill(self, boot: str) -> Engine:
        """A process dies: its pairs break, its connections close."""
        engine = self.engines.pop(boot)
        if isinstance(self.wires, LocalWires):
            self.wires.hub.kill(boot)
        else:
            engine.service.close()
        for other in list(self.engines):
            if frozenset((boot, other)) in self.connected:
                self.disconnect(boot, other)
        return engine

    def deliver(self, src: str, dst: str) -> None:
        """Hand over the oldest message of one connection."""
        queue = self.queues[(src, dst)]
        message = queue.popleft()
        if not queue:
            del self.queues[(src, dst)]
        message = self.tamper(src, dst, message)
        if message is not None and dst in self.engines:
            body = wire.decode(wire.encode(wire.Envelope(src=src, dst=dst, seq=0, body=message))).body
            self.history.append((src, dst, body))
            self.engines[dst].service.handle_message(src, body, self.now)

    def deliver_all(self) -> bool:
        moved = False
        while self.queues or self.dials:
            moved = True
            while self.dials:
                self.connect()
            for src, dst in list(self.queues):
                if (src, dst) in self.queues:
                    self.deliver(src, dst)
        return moved

    # --- running ----------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Deliver everything and turn every engine once."""
        self.wake.clear()
        moved = self.deliver_all()
        if isinstance(self.wires, LocalWires) and self.wires.hub.is_manual:
            for prefix, pair_seq in self.wires.hub.deliverable():
                self.wires.hub.deliver(prefix, pair_seq)
                moved = True
        for engine in list(self.engines.values()):
            if not engine.is_paused:
                moved |= engine.turn()
        return moved

    def run(self, until: Callable[[], bool], *, max_turns: int = 3000, step_s: float = 0.01) -> None:
        """Turn until a condition holds; fails when it does not come true."""
        deadline = time.monotonic() + 30.0
        for _ in range(max_turns):
            if until():
                return
            moved = self.turn()
            if not self.is_real:
                self.advance(step_s)
            elif not moved:
                self.wake.wait(0.02)
            if self.is_real and time.monotonic() > deadline:
                break
        assert until(), self.describe()

    def settle(self) -> None:
        """Run until no engine has anything left to do."""
        self.run(
            lambda: not self.queues and not self.dials and not any(self._is_busy(e) for e in self.engines.values())
        )

    def _is_busy(self, engine: Engine) -> bool:
        return engine.service.is_busy() or bool(engine.scheduler.sequences)

    def finish(self) -> None:
        """Settle, then check that nothing is left anywhere."""
        self.settle()
        for engine in self.engines.values():
            engine.assert_idle()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.service.close()
        self.wires.close()

    def describe(self) -> str:
        """What everybody is at, for failures."""
        lines = []
        for engine in self.engines.values():
            receiving, sending = engine.service._receiving, engine.service._sending
            received = [(entry.receiver.state.value, entry.tid) for entry in receiving._entries.values()]
            senders = [transfer.sender for transfer in sending._transfers.values()]
            sent = [(sender.state.value, sender.tid, sender.num_inflight) for sender in senders]
            waiting = [(s.rid, s.status.value, s.num_computed) for s in engine.scheduler.sequences.values()]
            lines.append(f"{engine.boot}: receiving {received} sending {sent} sequences {waiting}")
            lines.append(f"  payloads {len(receiving.inbound._payloads)} flights {len(sending.outbound._flights)}")
        lines.append(f"queues {[(key, len(queue)) for key, queue in self.queues.items()]}")
        return "\n".join(lines)
