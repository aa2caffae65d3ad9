"""The decode engine's side of transfers: runs the receiver machines against link, scheduler and ranks.

One entry per sequence that waits for KV; `inbound` owns pairs, slots and payloads and tells this side what landed.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry_engine.request import Sequence
from kvferry_engine.transfer.inbound import Inbound
from kvferry_engine.transfer.peers import Peers
from kvferry_engine.transfer.ports import TransferContext
from kvferry_engine.transfer.protocol.actions import (
    Action,
    Ask,
    Begin,
    Commit,
    Finish,
    Landed,
    Outcome,
    OwnerAbort,
    PairReady,
    PeerLost,
    PeerReady,
    PeerRefused,
    Reach,
    ReceiverEvent,
    Rejoin,
    Reserve,
    Room,
    Tell,
    Tick,
)
from kvferry_engine.transfer.protocol.receiver import Receiver, ReceiverState
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.hashing import chain_hashes

log = logging.getLogger(__name__)

MAX_REPORTS = 4096
"""Finished transfers remembered for prompt reports; a report is asked for with the first token."""
RATE_SMOOTHING = 0.2

ReceiverMessage = wire.Queued | wire.Busy | wire.Reject | wire.Start | wire.Done | wire.TransferAbort | wire.AbortAck


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """A sequence that waits for KV."""

    sequence: Sequence
    receiver: Receiver
    hints: list[wire.PrefillHint]
    begun_s: float
    tid: str = ""
    awaited: wire.PrefillHint | None = None
    """The candidate whose connection is awaited."""
    peer_name: str = ""
    num_bytes: int = 0
    granted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ferried:
    """What a prompt report says about a finished transfer."""

    peer_name: str
    num_bytes: int
    exposed_s: float


class Receiving:
    """All transfers into this engine."""

    def __init__(self, context: TransferContext, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._entries: dict[int, Entry] = {}
        self._by_tid: dict[str, Entry] = {}
        self._numbers = itertools.count(1)
        self._reports: OrderedDict[int, Ferried] = OrderedDict()
        self.bytes_per_s = 0.0
        self.inbound = Inbound(context, peers, on_chunk=self._on_chunk, on_landed=self._on_landed, find=self._wanting)

    @property
    def is_busy(self) -> bool:
        return bool(self._entries) or self.inbound.is_busy

    def next_timers(self) -> Iterable[float]:
        """When the machines want to be ticked, on the core's clock."""
        timers = (entry.receiver.next_timer_s() for entry in self._entries.values())
        yield from (timer for timer in timers if timer is not None)
        yield from self.inbound.next_timers()

    def start(self, sequence: Sequence, hints: list[wire.PrefillHint], *, force: bool, now: float) -> bool:
        """Decide whether to ferry a new sequence's prompt, and begin; False: the caller queues it as usual."""
        settings, scheduler = self._context.settings, self._context.scheduler
        block_size = settings.layout.block_size
        want_blocks = (sequence.num_tokens - 1) // block_size
        usable = [hint for hint in hints if hint.boot != settings.boot and hint.address != settings.address]
        if want_blocks == 0 or not usable:
            return False
        hashes = chain_hashes(
            sequence.ids(0, want_blocks * block_size).astype("<i4").tobytes(), block_size, sequence.root
        )
        num_missing = (want_blocks - len(self._context.index.lookup(hashes))) * block_size
        if num_missing == 0 or (num_missing < settings.min_remote_tokens and not force):
            return False
        have_blocks = scheduler.attach_prefix(sequence) // block_size
        entry = Entry(
            sequence=sequence,
            receiver=Receiver(
                key=f"{settings.boot}:{next(self._numbers)}",
                num_candidates=len(usable),
                have_blocks=have_blocks,
                want_blocks=want_blocks,
                block_size=block_size,
                times=settings.times,
            ),
            hints=usable,
            begun_s=now,
        )
        self._entries[sequence.handle] = entry
        self._feed(entry, Begin(), now)
        return True

    def abort(self, handle: int, reason: str, now: float) -> None:
        """The owner gave the sequence up; the caller frees its blocks."""
        entry = self._entries.get(handle)
        if entry is not None:
            self._feed(entry, OwnerAbort(reason), now)
            self._forget(entry)

    def report(self, handle: int) -> Ferried | None:
        """What is known about the finished transfer of a sequence; asked once."""
        return self._reports.pop(handle, None)

    def peer_up(self, boot: str, now: float) -> None:
        """A peer is connected: entries that wait for it go on."""
        for entry in list(self._entries.values()):
            if (
                entry.awaited is not None
                and (peer := self._peers.find(entry.awaited)) is not None
                and peer.boot == boot
            ):
                self._feed(entry, self._reached(entry, entry.awaited), now)

    def peer_down(self, boot: str, now: float) -> None:
        self.inbound.peer_down(boot, now)
        self._lose(boot, "peer gone", now, is_dead=True)

    def handle(self, boot: str, message: ReceiverMessage, now: float) -> None:
        """A message about one transfer."""
        entry = self._by_tid.get(message.tid)
        if entry is not None and entry.tid == message.tid == entry.receiver.tid and entry.receiver.boot == boot:
            self._feed(entry, message, now)
        elif isinstance(message, wire.Queued | wire.Start | wire.Done):
            self._context.refuse_unknown(boot, message.tid)
        elif isinstance(message, wire.TransferAbort):
            self._context.link.send(boot, wire.AbortAck(tid=message.tid))
        self.inbound.grant_all()

    def tick(self, now: float) -> None:
        self.inbound.tick(now)
        for entry in list(self._entries.values()):
            timer = entry.receiver.next_timer_s()
            if timer is not None and now >= timer:
                self._feed(entry, Tick(), now)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Pass on what became of pair groups, and give credits for free slots."""
        while changes := self.inbound.drain_pair_changes():
            for boot, change in changes:
                if isinstance(change, PairReady):
                    for entry in self._entries_with(boot):
                        self._feed(entry, change, now)
                elif change.is_opening:
                    for entry in self._entries_with(boot):
                        self._feed(entry, PeerRefused(change.reason), now)
                else:
                    self._lose(boot, change.reason, now, is_dead=False)
        self.inbound.grant_all()

    # --- the machines -----------------------------------------------------------------------------------------------

    def _feed(self, entry: Entry, event: ReceiverEvent, now: float) -> None:
        """Give a machine an event and carry out what it asks for, further events included."""
        events: deque[ReceiverEvent] = deque([event])
        while events:
            for action in entry.receiver.handle(events.popleft(), now):
                answer = self._carry_out(entry, action, now)
                if answer is not None:
                    events.append(answer)
            self.inbound.set_granted(entry.sequence.handle, self._granted_boot(entry))

    def _granted_boot(self, entry: Entry) -> str:
        receiver = entry.receiver
        return receiver.boot if receiver.state is ReceiverState.GRANTED and receiver.done is None else ""

    def _carry_out(self, entry: Entry, action: Action, now: float) -> ReceiverEvent | None:
        match action:
            case Tell(boot, message):
                if isinstance(message, wire.Grant):
                    entry.granted_s = now
                self._context.link.send(boot, message)
            case Reach(index):
                return self._reach(entry, entry.hints[index])
            case Ask():
                return self._ask(entry, action, now)
            case Rejoin(boot):
                peer = self._peers.get(boot)
                if peer is None or not self.inbound.can_join(peer, now):
                    return PeerRefused("no pair with the peer")
                return self.inbound.want_pairs(peer, now)
            case Reserve(num_blocks):
                reserved = self._context.scheduler.reserve_remote(entry.sequence, num_blocks)
                return Room(reserved is not None)
            case Commit(num_blocks):
                self._context.scheduler.commit_remote(entry.sequence, num_blocks)
            case Finish(reason):
                self._finish(entry, reason, now)
            case _:
                raise AssertionError(f"a receiver does not ask for {action}")
        return None

    def _reach(self, entry: Entry, hint: wire.PrefillHint) -> ReceiverEvent | None:
        if self._peers.find(hint) is not None:
            return self._reached(entry, hint)
        entry.awaited = hint
        if hint.address:
            self._context.link.connect(hint.address)
            return None
        return PeerRefused("no address")

    def _reached(self, entry: Entry, hint: wire.PrefillHint) -> ReceiverEvent:
        peer = self._peers.find(hint)
        assert peer is not None
        entry.awaited = None
        if peer.refusal:
            return PeerRefused(peer.refusal)
        if peer.boot == self._context.settings.boot:
            return PeerRefused("that is this engine")
        entry.peer_name = peer.name
        return PeerReady(peer.boot)

    def _ask(self, entry: Entry, action: Ask, now: float) -> ReceiverEvent | None:
        peer = self._peers.get(action.boot)
        if peer is None or not self.inbound.can_join(peer, now):
            return PeerRefused("no pair with the peer")
        self._by_tid.pop(entry.tid, None)
        entry.tid = action.tid
        self._by_tid[action.tid] = entry
        sequence = entry.sequence
        block_size = self._context.settings.layout.block_size
        self._context.link.send(
            action.boot,
            wire.Prefill(
                tid=action.tid,
                prompt_ids=sequence.ids(0, sequence.num_tokens).astype("<i4").tobytes(),
                have=action.have_blocks * block_size,
                upto=(sequence.num_tokens - 1) // block_size * block_size,
                root=sequence.root,
                priority=sequence.priority,
                remaining_s=None if sequence.deadline_s is None else max(sequence.deadline_s - now, 0.0),
            ),
        )
        return self.inbound.want_pairs(peer, now)

    def _finish(self, entry: Entry, reason: str, now: float) -> None:
        counters = self._context.counters
        receiver = entry.receiver
        if receiver.state is ReceiverState.READY:
            counters.transfers_in += 1
            if now > entry.granted_s and entry.num_bytes:
                rate = entry.num_bytes / (now - entry.granted_s)
                self.bytes_per_s += (RATE_SMOOTHING if self.bytes_per_s else 1.0) * (rate - self.bytes_per_s)
        else:
            counters.transfer_failures += 1
            log.info("transfer ended handle=%d reason=%s blocks=%d", entry.sequence.handle, reason, receiver.watermark)
        exposed_s = now - entry.begun_s
        if receiver.done is not None and receiver.started_s is not None:
            exposed_s = max(now - receiver.started_s - receiver.done.compute_s, 0.0)
        self._reports[entry.sequence.handle] = Ferried(
            peer_name=entry.peer_name if entry.num_bytes else "", num_bytes=entry.num_bytes, exposed_s=exposed_s
        )
        while len(self._reports) > MAX_REPORTS:
            self._reports.popitem(last=False)
        self._forget(entry)
        self._context.scheduler.finish_remote(entry.sequence, now)

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.sequence.handle, None)
        self._by_tid.pop(entry.tid, None)
        self.inbound.set_granted(entry.sequence.handle, "")

    def _entries_with(self, boot: str) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.receiver.boot == boot]

    def _lose(self, boot: str, reason: str, now: float, *, is_dead: bool) -> None:
        for entry in self._entries_with(boot):
            self._feed(entry, PeerLost(boot, reason, is_dead), now)

    # --- what inbound asks and tells --------------------------------------------------------------------------------

    def _wanting(self, chunk: wire.Chunk) -> Sequence | None:
        """The sequence a chunk is for, while it is still wanted."""
        entry = self._by_tid.get(chunk.tid)
        if entry is None or entry.receiver.tid != chunk.tid or entry.receiver.state is not ReceiverState.GRANTED:
            return None
        return entry.sequence

    def _on_chunk(self, chunk: wire.Chunk, now: float) -> None:
        entry = self._by_tid.get(chunk.tid)
        if entry is not None and entry.receiver.tid == chunk.tid:
            self._feed(entry, chunk, now)

    def _on_landed(self, landed: Landed, now: float) -> None:
        entry = self._by_tid.get(landed.chunk.tid)
        if entry is not None and entry.receiver.tid == landed.chunk.tid:
            if landed.outcome is Outcome.OK:
                entry.num_bytes += landed.chunk.num_bytes
            self._feed(entry, landed, now)
