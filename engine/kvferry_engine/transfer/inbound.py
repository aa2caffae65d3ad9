"""The receiving end of pairs: opens groups with sender engines, takes announced payloads into staging slots, gives credits.

Every announced payload is received exactly once, wanted or not, because the wire has an order; only a wanted and verified one
reaches the cache. `receiving` decides what is wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry_engine.request import Sequence
from kvferry_engine.transfer.commands import (
    AnyEvent,
    ClosePair,
    OpenPair,
    PairBroken,
    PairId,
    PairOpened,
    PayloadReceived,
    PostReceive,
    ReceivePosted,
    Scatter,
    Scattered,
    transfer_mark,
)
from kvferry_engine.transfer.peers import Peer, Peers, rank_pairs, streams_between
from kvferry_engine.transfer.ports import TransferContext
from kvferry_engine.transfer.protocol.actions import Landed, Outcome, PairReady, range_of
from kvferry_engine.transfer.protocol.credits import CreditPool
from kvferry_engine.transfer.protocol.pairing import (
    CloseGroups,
    OpenGroups,
    PairAction,
    PairsDown,
    PairState,
    PairsUp,
    ReceiverPairs,
    SayClosed,
    SendJoin,
)
from kvferry_engine.transfer.protocol.slices import Stream, chunk_bytes, heads_of_rank
from kvferry_engine.transfer.protocol.watch import PayloadWatch
from kvferry_engine.wire import messages as wire

log = logging.getLogger(__name__)

CreditKey = tuple[str, int, int]
"""(sender boot, sender rank, epoch)."""


@dataclass(frozen=True, slots=True)
class PairLost:
    """The groups with a peer are gone; `is_opening`: they never came up."""

    reason: str
    is_opening: bool


@dataclass(eq=False, slots=True, kw_only=True)
class ReceiverLink:
    """All pairs with one sender engine."""

    peer: Peer
    pairs: ReceiverPairs
    ranks: list[tuple[int, int]]
    streams: dict[tuple[int, int, int], Stream] = field(default_factory=dict)
    transport_index: int = 0
    transport: str = ""
    next_seq: dict[tuple[int, int], int] = field(default_factory=dict)
    watches: dict[tuple[int, int], PayloadWatch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An announced payload and the slot it was given."""

    boot: str
    chunk: wire.Chunk
    stream: Stream
    slot: int
    key: CreditKey


class Inbound:
    """Pairs, slots and credits of this engine as a receiver."""

    def __init__(
        self,
        context: TransferContext,
        peers: Peers,
        *,
        on_chunk: Callable[[wire.Chunk, float], None],
        on_landed: Callable[[Landed, float], None],
        find: Callable[[wire.Chunk], Sequence | None],
    ) -> None:
        self._context = context
        self._peers = peers
        self._on_chunk = on_chunk
        self._on_landed = on_landed
        self._find = find
        settings = context.settings
        self._links: dict[str, ReceiverLink] = {}
        self._epochs: dict[str, int] = {}
        self._pools = [CreditPool[CreditKey](settings.num_receive_slots) for _ in range(settings.tensor_parallel)]
        self._free_slots = [list(range(settings.num_receive_slots)) for _ in range(settings.tensor_parallel)]
        self._payloads: dict[tuple[PairId, int], Payload] = {}
        self._granted: dict[int, str] = {}
        self._changes: list[tuple[str, PairReady | PairLost]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._payloads) or any(link.pairs.next_timer_s() is not None for link in self._links.values())

    @property
    def num_free_slots(self) -> int:
        """Receive slots without a payload, over all ranks."""
        return sum(len(slots) for slots in self._free_slots)

    def next_timers(self) -> Iterable[float]:
        for link in self._links.values():
            timers = (link.pairs.next_timer_s(), *(watch.next_timer_s() for watch in link.watches.values()))
            yield from (timer for timer in timers if timer is not None)

    # --- pairs ------------------------------------------------------------------------------------------------------

    def can_join(self, peer: Peer, now: float) -> bool:
        """False while a failed join with the peer is fresh."""
        link = self._links.get(peer.boot)
        return link is None or link.pairs.can_join(now)

    def want_pairs(self, peer: Peer, now: float) -> PairReady | None:
        """Have the groups with a peer opened; PairReady at once when they are, else later by `drain_pair_changes`."""
        link = self._links.get(peer.boot)
        if link is None:
            settings = self._context.settings
            ranks = rank_pairs(
                streams_between(peer.tensor_parallel, settings.tensor_parallel, settings, settings.slot_bytes)
            )
            pairs = ReceiverPairs(len(ranks), settings.times, epoch=self._epochs.get(peer.boot, 0))
            link = self._links[peer.boot] = ReceiverLink(peer=peer, pairs=pairs, ranks=ranks)
        if link.pairs.state is PairState.OPEN:
            return self._ready(link)
        self._carry_out(link, link.pairs.want(now))
        return None

    def join_ok(self, boot: str, message: wire.JoinOk, now: float) -> None:
        link = self._links.get(boot)
        if link is None:
            return
        settings = self._context.settings
        is_ok, reason = message.ok, message.message
        if is_ok and (
            message.sender_tensor_parallel != link.peer.tensor_parallel or message.transport not in settings.transports
        ):
            is_ok, reason = False, "the peer is not what its HELLO said"
        if is_ok and message.epoch == link.pairs.epoch:
            slot_bytes = min(message.slot_bytes or settings.slot_bytes, settings.slot_bytes)
            try:
                streams = streams_between(link.peer.tensor_parallel, settings.tensor_parallel, settings, slot_bytes)
            except ValueError as error:
                is_ok, reason, streams = False, str(error), ()
            link.streams = {stream.key: stream for stream in streams}
            link.transport = message.transport
        self._carry_out(link, link.pairs.joined(message.epoch, is_ok, reason, now))

    def peer_closed(self, boot: str, message: wire.PairClosed, now: float) -> None:
        link = self._links.get(boot)
        if link is not None:
            self._carry_out(link, link.pairs.peer_closed(message.epoch, message.reason, now))

    def close_pairs(self, boot: str, reason: str, now: float) -> None:
        """Give up the groups with a peer (wedged, or it breaks the protocol)."""
        link = self._links.get(boot)
        if link is not None:
            log.warning("pair closed peer=%s epoch=%d reason=%s", boot, link.pairs.epoch, reason)
            self._carry_out(link, link.pairs.failed(link.pairs.epoch, reason, now))

    def peer_down(self, boot: str, now: float) -> None:
        """The peer is gone: its groups, too. The epoch is remembered in case only the connection broke."""
        link = self._links.pop(boot, None)
        if link is not None:
            self._carry_out(link, link.pairs.failed(link.pairs.epoch, "peer gone", now))
            self._epochs[boot] = link.pairs.epoch

    def tick(self, now: float) -> None:
        for boot, link in list(self._links.items()):
            self._carry_out(link, link.pairs.tick(now))
            if any(watch.is_stalled(now) for watch in link.watches.values()):
                self.close_pairs(boot, "a payload does not come", now)

    def drain_pair_changes(self) -> list[tuple[str, PairReady | PairLost]]:
        """(boot, what happened) since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _ready(self, link: ReceiverLink) -> PairReady:
        return PairReady(tuple(link.streams.values()), self._context.settings.layout.num_layers)

    def _carry_out(self, link: ReceiverLink, actions: list[PairAction]) -> None:
        settings, boot = self._context.settings, link.peer.boot
        was_opening = not link.next_seq
        for action in actions:
            match action:
                case SendJoin(epoch):
                    self._context.link.send(boot, self._join_message(link, epoch))
                case OpenGroups(epoch):
                    for p_rank, d_rank in link.ranks:
                        pair = PairId(boot, settings.boot, p_rank, d_rank, epoch)
                        self._context.ranks.post(
                            d_rank,
                            OpenPair(
                                pair, is_sender=False, transport=link.transport, store_address=settings.store_address
                            ),
                        )
                case CloseGroups(epoch):
                    for p_rank, d_rank in link.ranks:
                        self._pools[d_rank].drop((boot, p_rank, epoch))
                        self._context.ranks.post(d_rank, ClosePair(PairId(boot, settings.boot, p_rank, d_rank, epoch)))
                    link.next_seq, link.watches = {}, {}
                case SayClosed(epoch, reason):
                    self._context.link.send(boot, wire.PairClosed(epoch=epoch, reason=reason, by_receiver=True))
                case PairsUp():
                    link.next_seq = dict.fromkeys(link.ranks, 0)
                    link.watches = {ranks: PayloadWatch(settings.times.stall_s) for ranks in link.ranks}
                    log.info("pair open peer=%s epoch=%d transport=%s", boot, link.pairs.epoch, link.transport)
                    self._changes.append((boot, self._ready(link)))
                case PairsDown(reason):
                    if was_opening and link.transport and link.transport_index < len(settings.transports) - 1:
                        link.transport_index += 1
                    self._changes.append((boot, PairLost(reason, is_opening=was_opening)))

    def _join_message(self, link: ReceiverLink, epoch: int) -> wire.Join:
        settings = self._context.settings
        link.transport = ""
        return wire.Join(
            epoch=epoch,
            store_address=settings.store_address,
            ranks=link.ranks,
            pair_hash=settings.pair_hash,
            transport=settings.transports[link.transport_index],
            receiver_tensor_parallel=settings.tensor_parallel,
            receiver_address=settings.address,
            slot_bytes=settings.slot_bytes,
        )

    # --- payloads ---------------------------------------------------------------------------------------------------

    def announce(self, boot: str, chunk: wire.Chunk, now: float) -> None:
        """CHUNK arrived: post its receive, then tell the transfer. A chunk that breaks the rules closes the pair."""
        link = self._links.get(boot)
        if link is None or link.pairs.state is not PairState.OPEN or chunk.epoch != link.pairs.epoch:
            return
        settings = self._context.settings
        ranks = (chunk.p_rank, chunk.d_rank)
        stream = link.streams.get((chunk.d_rank, chunk.head_start, chunk.head_stop))
        key = (boot, chunk.p_rank, chunk.epoch)
        is_known = stream is not None and stream.p_rank == chunk.p_rank and chunk.pair_seq == link.next_seq[ranks]
        is_sized = (
            stream is not None
            and 0 < chunk.num_bytes <= settings.slot_bytes
            and chunk.num_bytes == chunk_bytes(stream, range_of(chunk), settings.layout)
        )
        if not is_known or not is_sized or stream is None or not self._pools[chunk.d_rank].consume(key):
            self.close_pairs(boot, f"announcement {chunk.pair_seq} breaks the rules", now)
            return
        link.next_seq[ranks] += 1
        link.watches[ranks].announced(chunk.pair_seq, now)
        pair = PairId(boot, settings.boot, chunk.p_rank, chunk.d_rank, chunk.epoch)
        slot = self._free_slots[chunk.d_rank].pop()
        self._payloads[(pair, chunk.pair_seq)] = Payload(boot=boot, chunk=chunk, stream=stream, slot=slot, key=key)
        self._context.ranks.post(
            chunk.d_rank, PostReceive(pair, pair_seq=chunk.pair_seq, slot=slot, num_bytes=chunk.num_bytes)
        )
        self._on_chunk(chunk, now)

    def on_event(self, event: AnyEvent, now: float) -> None:
        """A rank reported something about a pair in which this engine receives."""
        match event:
            case PairOpened(pair):
                if (link := self._links.get(pair.p_boot)) is not None:
                    self._carry_out(link, link.pairs.opened(pair.epoch, now))
            case PairBroken(pair, reason):
                if (link := self._links.get(pair.p_boot)) is not None:
                    log.warning("pair broke peer=%s epoch=%d reason=%s", pair.p_boot, pair.epoch, reason)
                    self._carry_out(link, link.pairs.failed(pair.epoch, reason, now))
            case ReceivePosted(pair, pair_seq):
                message = wire.Posted(pair_seq=pair_seq, p_rank=pair.p_rank, d_rank=pair.d_rank, epoch=pair.epoch)
                self._context.link.send(pair.p_boot, message)
            case PayloadReceived(pair, pair_seq, is_ok):
                link = self._links.get(pair.p_boot)
                if link is not None and link.pairs.epoch == pair.epoch and link.watches:
                    link.watches[(pair.p_rank, pair.d_rank)].arrived(pair_seq, now)
                self._received(self._payloads[(pair, pair_seq)], pair, is_ok)
            case Scattered(pair, pair_seq, outcome):
                payload = self._free(pair, pair_seq)
                self._count(payload.chunk, outcome)
                self._on_landed(Landed(payload.chunk, outcome), now)
            case _:
                raise AssertionError(f"a receiving rank does not report {event}")

    def _received(self, payload: Payload, pair: PairId, is_ok: bool) -> None:
        chunk = payload.chunk
        sequence = self._find(chunk) if is_ok else None
        if sequence is None:
            self._free(pair, chunk.pair_seq)
            return
        settings = self._context.settings
        first_head, _ = heads_of_rank(chunk.d_rank, settings.tensor_parallel, settings.layout.num_kv_heads)
        blocks = sequence.blocks[chunk.block_start : chunk.block_stop]
        command = Scatter(
            pair,
            pair_seq=chunk.pair_seq,
            slot=payload.slot,
            num_bytes=chunk.num_bytes,
            mark=transfer_mark(chunk.tid),
            blocks=np.asarray(blocks, dtype="<i4").tobytes(),
            layer_start=chunk.layer_start,
            layer_stop=chunk.layer_stop,
            head_start=chunk.head_start - first_head,
            head_stop=chunk.head_stop - first_head,
        )
        self._context.ranks.post(chunk.d_rank, command)

    def _free(self, pair: PairId, pair_seq: int) -> Payload:
        payload = self._payloads.pop((pair, pair_seq))
        self._free_slots[pair.d_rank].append(payload.slot)
        self._pools[pair.d_rank].release(payload.key)
        return payload

    def _count(self, chunk: wire.Chunk, outcome: Outcome) -> None:
        counters = self._context.counters
        match outcome:
            case Outcome.OK:
                counters.transfer_bytes_in += chunk.num_bytes
            case Outcome.TOMBSTONE:
                counters.tombstones += 1
            case Outcome.CORRUPT:
                counters.corrupt_chunks += 1
                log.error("corrupt chunk tid=%s pair_seq=%d", chunk.tid, chunk.pair_seq)
            case Outcome.FAILED:
                return

    # --- credits ----------------------------------------------------------------------------------------------------

    def set_granted(self, handle: int, boot: str) -> None:
        """A sequence's transfer from `boot` may need credits; empty: not (any more)."""
        if boot:
            self._granted[handle] = boot
        else:
            self._granted.pop(handle, None)

    def credit_returned(self, boot: str, message: wire.Credit) -> None:
        if not 0 <= message.d_rank < len(self._pools):
            return
        self._pools[message.d_rank].give_back((boot, message.p_rank, message.epoch), message.credits)
        self.grant_all()

    def grant_all(self) -> None:
        """Give credits for free slots to pairs with live transfers."""
        boots = set(self._granted.values())
        if not boots:
            return
        open_links = [
            link for boot, link in self._links.items() if boot in boots and link.pairs.state is PairState.OPEN
        ]
        for d_rank, pool in enumerate(self._pools):
            if not pool.num_free:
                continue
            keys: list[CreditKey] = [
                (link.peer.boot, p_rank, link.pairs.epoch)
                for link in open_links
                for p_rank, rank in link.ranks
                if rank == d_rank
            ]
            for (boot, p_rank, epoch), count in pool.grant(keys):
                self._context.link.send(boot, wire.Credit(p_rank=p_rank, d_rank=d_rank, credits=count, epoch=epoch))
