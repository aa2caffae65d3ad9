"""The two ends of one transfer alone, every message at risk: both always end, and nothing counts that did not land."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
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

from kvferry_engine.transfer.protocol.actions import (
    Action,
    Ask,
    Begin,
    Cached,
    CancelSends,
    Commit,
    ComputeFailed,
    Evicted,
    Finish,
    Granted,
    Landed,
    Outcome,
    OwnerAbort,
    PairReady,
    PeerLost,
    PeerReady,
    PeerRefused,
    Progress,
    Reach,
    ReceiverEvent,
    Rejoin,
    Reserve,
    Room,
    Sent,
    StopCompute,
    Tell,
    Tick,
    TransferTimes,
)
from kvferry_engine.transfer.protocol.receiver import Receiver, ReceiverState
from kvferry_engine.transfer.protocol.sender import Sender, SenderState
from kvferry_engine.transfer.protocol.slices import ChunkShape, Stream, make_streams
from kvferry_engine.wire import messages as wire

BLOCK_SIZE = 16
NUM_LAYERS = 4
TIMES = TransferTimes()
choose = st.integers(0, 1 << 16)
rarely = st.integers(0, 29).map(lambda value: value == 13)
seldom = st.integers(0, 9).map(lambda value: value == 7)


@dataclass
class Peer:
    """One candidate: its sender machine (made by PREFILL) and messages under way in both directions."""

    boot: str
    streams: tuple[Stream, ...]
    sender: Sender | None = None
    to_sender: deque[wire.Body] = field(default_factory=deque)
    to_receiver: deque[wire.Body] = field(default_factory=deque)
    flights: list[wire.Chunk] = field(default_factory=list)
    num_computed: int = 0
    is_stopped: bool = False


class LossyTransfer(RuleBasedStateMachine):
    """One receiver, two candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.committed = 0
        self.landed: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
        self.is_finished = False

    @initialize(
        have=st.integers(0, 3),
        want=st.integers(4, 9),
        ranks=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
        shape=st.sampled_from([ChunkShape(1, 1), ChunkShape(1, 3), ChunkShape(1, 4), ChunkShape(3, 4)]),
    )
    def begin(self, have: int, want: int, ranks: tuple[int, int], shape: ChunkShape) -> None:
        self.have, self.want, self.shape = have, want, shape
        self.streams = tuple(make_streams(*ranks, 2))
        self.peers = [Peer("p1", self.streams), Peer("p2", self.streams)]
        self.committed = have
        self.receiver = Receiver(
            key="d1:1", num_candidates=2, have_blocks=have, want_blocks=want, block_size=BLOCK_SIZE, times=TIMES
        )
        self.tell_receiver(Begin())

    # --- the harness ------------------------------------------------------------------------------------------------

    def tell_receiver(self, event: ReceiverEvent) -> None:
        events = deque([event])
        while events:
            for action in self.receiver.handle(events.popleft(), self.now):
                match action:
                    case Reach(index):
                        self.reached = index
                    case Ask(boot, tid, have_blocks):
                        assert have_blocks == self.receiver.watermark
                        self.peer(boot).to_sender.append(
                            wire.Prefill(tid=tid, prompt_ids=b"", have=have_blocks, upto=self.want)
                        )
                    case Rejoin():
                        events.append(PairReady(self.streams, NUM_LAYERS))
                    case Reserve():
                        self.wants_room = True
                    case Commit(num_blocks):
                        assert num_blocks > self.committed
                        for stream in self.streams:
                            pieces = self.landed.get(stream.key, set())
                            for block in range(self.committed, num_blocks):
                                assert all((block, layer) in pieces for layer in range(NUM_LAYERS))
                        self.committed = num_blocks
                    case Finish():
                        assert not self.is_finished
                        self.is_finished = True
                    case Tell(boot, message):
                        self.peer(boot).to_sender.append(message)

    def tell_sender(self, peer: Peer, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(_, message):
                    peer.to_receiver.append(message)
                case StopCompute():
                    assert not peer.is_stopped
                    peer.is_stopped = True
                case CancelSends():
                    assert peer.flights

    def peer(self, boot: str) -> Peer:
        return next(peer for peer in self.peers if peer.boot == boot)

    def current(self) -> Peer | None:
        return self.peer(self.receiver.boot) if self.receiver.boot else None

    # --- what happens -----------------------------------------------------------------------------------------------

    reached: int | None = None
    wants_room = False

    @precondition(lambda self: self.reached is not None)
    @rule(is_refused=seldom)
    def answer_reach(self, is_refused: bool) -> None:
        index, self.reached = self.reached, None
        assert index is not None
        self.tell_receiver(PeerRefused("no") if is_refused else PeerReady(self.peers[index].boot))

    @precondition(lambda self: self.receiver.boot)
    @rule()
    def pair_opens(self) -> None:
        self.tell_receiver(PairReady(self.streams, NUM_LAYERS))

    @precondition(lambda self: self.wants_room)
    @rule(is_full=seldom)
    def answer_room(self, is_full: bool) -> None:
        self.wants_room = False
        self.tell_receiver(Room(not is_full))

    @rule(index=st.integers(0, 1), is_lost=rarely)
    def to_sender(self, index: int, is_lost: bool) -> None:
        peer = self.peers[index]
        if not peer.to_sender:
            return
        message = peer.to_sender.popleft()
        if is_lost:
            return
        sender = peer.sender
        if isinstance(message, wire.Prefill):
            if sender is not None and sender.num_inflight:
                peer.to_receiver.append(wire.Reject(tid=message.tid, message="harness keeps one"))
                return
            peer.sender = Sender(
                tid=message.tid,
                boot=peer.boot,
                have_blocks=message.have,
                want_blocks=message.upto,
                block_size=BLOCK_SIZE,
                times=TIMES,
            )
            peer.num_computed, peer.is_stopped = 0, False
            peer.to_receiver.append(wire.Queued(tid=message.tid))
        elif sender is not None and getattr(message, "tid", "") == sender.tid:
            if isinstance(message, wire.Grant):
                self.tell_sender(peer, sender.handle(Granted(peer.streams, NUM_LAYERS), self.now))
            elif isinstance(message, wire.Close | wire.TransferAbort):
                self.tell_sender(peer, sender.handle(message, self.now))

    @rule(index=st.integers(0, 1), is_lost=rarely)
    def to_receiver(self, index: int, is_lost: bool) -> None:
        peer = self.peers[index]
        if not peer.to_receiver:
            return
        message = peer.to_receiver.popleft()
        if not is_lost and message.tid == self.receiver.tid and self.receiver.boot == peer.boot:  # type: ignore[union-attr]
            self.tell_receiver(message)  # type: ignore[arg-type]

    @rule(rounds=st.integers(1, 8))
    def go_on(self, rounds: int) -> None:
        """Some time in which nothing goes wrong."""
        for turn in range(rounds):
            if self.reached is not None:
                self.answer_reach(is_refused=False)
            if self.receiver.boot:
                self.pair_opens()
            if self.wants_room:
                self.answer_room(is_full=False)
            for index, peer in enumerate(self.peers):
                for _ in range(len(peer.to_sender)):
                    self.to_sender(index, is_lost=False)
                self.compute(index, 2)
                self.send(index, turn)
                self.send(index, turn + 1)
                for _ in range(len(peer.to_receiver)):
                    self.to_receiver(index, is_lost=False)
                self.land(index, 0, is_bad=False, outcome=Outcome.CORRUPT)
            self.now += 0.01

    @rule(index=st.integers(0, 1), count=st.integers(0, 4))
    def compute(self, index: int, count: int) -> None:
        peer = self.peers[index]
        if peer.sender is None or peer.is_stopped or peer.num_computed >= self.want:
            return
        peer.num_computed = min(peer.num_computed + count, self.want)
        is_finished = peer.num_computed >= self.want
        self.tell_sender(peer, peer.sender.handle(Progress(peer.num_computed, is_finished), self.now))

    @rule(index=st.integers(0, 1), what=st.integers(0, 2), is_rare=seldom)
    def trouble(self, index: int, what: int, is_rare: bool) -> None:
        peer = self.peers[index]
        if peer.sender is None or not is_rare:
            return
        if what == 0 and not peer.is_stopped and peer.num_computed < self.want:
            peer.is_stopped = True
            actions = peer.sender.handle(ComputeFailed("failed"), self.now)
            self.tell_sender(peer, [action for action in actions if not isinstance(action, StopCompute)])
        elif what == 1:
            self.tell_sender(peer, peer.sender.handle(Evicted(self.have + 1), self.now))
        elif what == 2 and peer.sender.state is SenderState.QUEUED:
            self.tell_sender(peer, peer.sender.handle(Cached(self.have + 2), self.now))

    @rule(index=st.integers(0, 1), choice=choose)
    def send(self, index: int, choice: int) -> None:
        peer = self.peers[index]
        if peer.sender is None:
            return
        ranks = sorted({(stream.p_rank, stream.d_rank) for stream in peer.streams})[
            choice % len({s.d_rank for s in peer.streams})
        ]
        chunk = peer.sender.next_chunk(ranks, lambda stream: self.shape)
        if chunk is None:
            return
        message = wire.Chunk(
            tid=peer.sender.tid,
            seq=chunk.seq,
            pair_seq=0,
            p_rank=chunk.stream.p_rank,
            d_rank=chunk.stream.d_rank,
            block_start=chunk.piece.block_start,
            block_stop=chunk.piece.block_stop,
            layer_start=chunk.piece.layer_start,
            layer_stop=chunk.piece.layer_stop,
            head_start=chunk.stream.head_start,
            head_stop=chunk.stream.head_stop,
            num_bytes=1,
        )
        peer.to_receiver.append(message)
        peer.flights.append(message)
        self.tell_sender(peer, peer.sender.announce(chunk, self.now))

    @rule(
        index=st.integers(0, 1),
        choice=choose,
        is_bad=rarely,
        outcome=st.sampled_from([Outcome.CORRUPT, Outcome.TOMBSTONE, Outcome.FAILED]),
    )
    def land(self, index: int, choice: int, is_bad: bool, outcome: Outcome) -> None:
        """A payload arrives, if its announcement did (as pairs guarantee); the sender is done with it either way."""
        outcome = outcome if is_bad else Outcome.OK
        peer = self.peers[index]
        if not peer.flights or peer.sender is None:
            return
        chunk = peer.flights.pop(choice % len(peer.flights))
        self.tell_sender(peer, peer.sender.handle(Sent(), self.now))
        is_pending = any(message is chunk for message in peer.to_receiver)
        key = (chunk.d_rank, chunk.head_start, chunk.head_stop)
        announced = self.receiver._announced.get(key) if self.receiver.tid == chunk.tid else None
        if is_pending or announced is None or self.receiver.state is not ReceiverState.GRANTED:
            return
        if chunk.seq >= self.receiver._next_seq.get((chunk.p_rank, chunk.d_rank), 0):
            return
        if outcome is Outcome.OK:
            self.landed.setdefault(key, set()).update(
                (block, layer)
                for block in range(chunk.block_start, chunk.block_stop)
                for layer in range(chunk.layer_start, chunk.layer_stop)
            )
        self.tell_receiver(Landed(chunk, outcome))

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.1, 0.5, 0.5, 3.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell_receiver(Tick())
        for peer in self.peers:
            if peer.sender is not None:
                self.tell_sender(peer, peer.sender.handle(Tick(), self.now))

    @rule(is_dead=st.booleans(), is_rare=rarely)
    def lose_pair(self, is_dead: bool, is_rare: bool) -> None:
        peer = self.current()
        if peer is None or not is_rare:
            return
        self.tell_receiver(PeerLost(peer.boot, "lost", is_dead))
        if peer.sender is not None:
            self.tell_sender(peer, peer.sender.handle(PeerLost("d1", "lost", is_dead), self.now))

    @rule(is_rare=rarely)
    def owner_aborts(self, is_rare: bool) -> None:
        if is_rare:
            self.tell_receiver(OwnerAbort("gone"))

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "receiver"):
            return
        assert self.receiver.watermark == self.committed <= self.want
        assert self.is_finished == (self.receiver.state in (ReceiverState.READY, ReceiverState.SALVAGED))
        for peer in self.peers:
            if peer.sender is not None:
                assert peer.sender.num_inflight == len(peer.flights)

    def teardown(self) -> None:
        """Silence: with timers alone both ends come to an end."""
        if not hasattr(self, "receiver"):
            return
        for peer in self.peers:
            while peer.flights and peer.sender is not None:
                peer.flights.pop()
                self.tell_sender(peer, peer.sender.handle(Sent(), self.now))
            if peer.sender is not None and not peer.is_stopped and peer.num_computed < self.want:
                self.tell_sender(peer, peer.sender.handle(Progress(self.want, is_finished=True), self.now))
        for _ in range(100):
            timers = [
                self.receiver.next_timer_s(),
                *(p.sender.next_timer_s() for p in self.peers if p.sender is not None),
            ]
            due = [timer for timer in timers if timer is not None]
            if not due:
                break
            self.now = max(self.now, min(due))
            self.tell_receiver(Tick())
            for peer in self.peers:
                if peer.sender is not None:
                    self.tell_sender(peer, peer.sender.handle(Tick(), self.now))
        assert self.receiver.is_over
        assert all(peer.sender is None or peer.sender.is_over for peer in self.peers)


def explore(*, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LossyTransfer,
        settings=settings(
            max_examples=max_examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_both_ends_end_whatever_is_lost() -> None:
    explore(max_examples=30, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_ends_end_over_ten_thousand_steps() -> None:
    explore(max_examples=200, steps=100)
