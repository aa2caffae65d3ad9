"""The sending end of pairs: opens groups with receiver engines, keeps their credits, and moves chunks through send slots.

A chunk's blocks are pinned from its announcement until its payload left; `sending` says which chunk is next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry_engine.kv_cache.block_pool import Owner
from kvferry_engine.transfer.commands import (
    AnyEvent,
    CancelSend,
    ClosePair,
    Launch,
    OpenPair,
    PairBroken,
    PairId,
    PairOpened,
    PayloadSent,
    Send,
    transfer_mark,
)
from kvferry_engine.transfer.peers import Peer, rank_pairs, streams_between
from kvferry_engine.transfer.ports import TransferContext
from kvferry_engine.transfer.protocol.pairing import (
    CloseGroups,
    OpenGroups,
    PairAction,
    PairsDown,
    PairState,
    PairsUp,
    SayClosed,
    SenderPairs,
)
from kvferry_engine.transfer.protocol.sender import NextChunk
from kvferry_engine.transfer.protocol.slices import ChunkShape, Stream, chunk_bytes, chunk_shape, heads_of_rank
from kvferry_engine.wire import messages as wire

log = logging.getLogger(__name__)

FIRST_PIN_ID = -2
"""Pins count down from here, so that they never look like a sequence's handle or like nobody (-1)."""


@dataclass(eq=False, slots=True, kw_only=True)
class SenderLink:
    """All pairs with one receiver engine."""

    peer: Peer
    pairs: SenderPairs
    ranks: list[tuple[int, int]] = field(default_factory=list)
    streams: tuple[Stream, ...] = ()
    shapes: dict[Stream, ChunkShape] = field(default_factory=dict)
    transport: str = ""
    store_address: str = ""
    credits: dict[tuple[int, int], int] = field(default_factory=dict)
    next_seq: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A chunk between announcement and completion."""

    tid: str
    blocks: list[int]
    pin: int
    slot: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LinkChange:
    """Groups with a receiver came up (`reason` None) or went down."""

    boot: str
    reason: str | None


class Outbound:
    """Pairs, credits and send slots of this engine as a sender."""

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        settings = context.settings
        self._links: dict[str, SenderLink] = {}
        self._free_slots = [list(range(settings.num_send_slots)) for _ in range(settings.tensor_parallel)]
        self._flights: dict[tuple[PairId, int], Flight] = {}
        self._next_pin = FIRST_PIN_ID
        self._changes: list[LinkChange] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._flights)

    @property
    def pinned(self) -> list[tuple[int, list[int]]]:
        """(pin id, blocks) of every chunk that is travelling, for the auditor."""
        return [(flight.pin, flight.blocks) for flight in self._flights.values()]

    def open_links(self) -> list[SenderLink]:
        return [link for link in self._links.values() if link.pairs.state is PairState.OPEN]

    def open_link(self, boot: str) -> SenderLink | None:
        """The link to a receiver when its groups are open."""
        link = self._links.get(boot)
        return link if link is not None and link.pairs.state is PairState.OPEN else None

    # --- pairs ------------------------------------------------------------------------------------------------------

    def join(self, peer: Peer, message: wire.Join) -> None:
        """A receiver wants pairs: answer, and open them when it is one of us."""
        settings = self._context.settings
        link = self._links.setdefault(peer.boot, SenderLink(peer=peer, pairs=SenderPairs()))
        if message.epoch <= link.pairs.epoch:
            return
        slot_bytes = min(message.slot_bytes or settings.slot_bytes, settings.slot_bytes)
        refusal, streams = self._plan(peer, message, slot_bytes)
        transport = message.transport if message.transport in settings.transports else settings.transports[-1]
        answer = wire.JoinOk(
            epoch=message.epoch,
            ok=not refusal,
            transport=transport,
            sender_tensor_parallel=settings.tensor_parallel,
            message=refusal,
            slot_bytes=settings.slot_bytes,
        )
        self._context.link.send(peer.boot, answer)
        if refusal:
            log.warning("join refused peer=%s reason=%s", peer.boot, refusal)
            return
        actions = link.pairs.join(message.epoch, len(message.ranks))
        closing = [action for action in actions if not isinstance(action, OpenGroups)]
        self._carry_out(link, closing)
        link.peer, link.transport, link.store_address = peer, transport, message.store_address
        link.streams, link.ranks = streams, rank_pairs(streams)
        link.shapes = {stream: chunk_shape(stream, settings.layout, slot_bytes) for stream in streams}
        link.credits = dict.fromkeys(link.ranks, 0)
        link.next_seq = dict.fromkeys(link.ranks, 0)
        self._carry_out(link, [action for action in actions if isinstance(action, OpenGroups)])

    def _plan(self, peer: Peer, message: wire.Join, slot_bytes: int) -> tuple[str, tuple[Stream, ...]]:
        """(why the join is refused or empty, its streams)."""
        settings = self._context.settings
        if peer.refusal:
            return peer.refusal, ()
        if message.pair_hash != settings.pair_hash:
            return "another kind of KV", ()
        try:
            streams = streams_between(settings.tensor_parallel, message.receiver_tensor_parallel, settings, slot_bytes)
        except ValueError as error:
            return str(error), ()
        if rank_pairs(streams) != [(p_rank, d_rank) for p_rank, d_rank in message.ranks]:
            return "the rank pairs differ", ()
        return "", streams

    def peer_closed(self, boot: str, message: wire.PairClosed) -> None:
        link = self._links.get(boot)
        if link is not None:
            self._carry_out(link, link.pairs.peer_closed(message.epoch, message.reason))

    def peer_down(self, boot: str) -> None:
        link = self._links.pop(boot, None)
        if link is not None:
            self._carry_out(link, link.pairs.peer_closed(link.pairs.epoch, "peer gone"))

    def drain_changes(self) -> list[LinkChange]:
        """What became of links since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _carry_out(self, link: SenderLink, actions: Iterable[PairAction]) -> None:
        settings, boot = self._context.settings, link.peer.boot
        for action in actions:
            match action:
                case OpenGroups(epoch):
                    for p_rank, d_rank in link.ranks:
                        pair = PairId(settings.boot, boot, p_rank, d_rank, epoch)
                        self._context.ranks.post(
                            p_rank,
                            OpenPair(pair, is_sender=True, transport=link.transport, store_address=link.store_address),
                        )
                case CloseGroups(epoch):
                    for p_rank, d_rank in link.ranks:
                        self._context.ranks.post(p_rank, ClosePair(PairId(settings.boot, boot, p_rank, d_rank, epoch)))
                    link.credits = {}
                case SayClosed(epoch, reason):
                    self._context.link.send(boot, wire.PairClosed(epoch=epoch, reason=reason, by_receiver=False))
                case PairsUp():
                    log.info("pair open peer=%s epoch=%d transport=%s", boot, link.pairs.epoch, link.transport)
                    self._changes.append(LinkChange(boot, None))
                case PairsDown(reason):
                    self._changes.append(LinkChange(boot, reason))
                case _:
                    raise AssertionError(f"a sender does not {action}")

    # --- credits ----------------------------------------------------------------------------------------------------

    def credit(self, boot: str, message: wire.Credit) -> None:
        """The receiver allows more chunks on a pair."""
        link = self._links.get(boot)
        ranks = (message.p_rank, message.d_rank)
        if link is not None and message.epoch == link.pairs.epoch and ranks in link.credits:
            link.credits[ranks] += message.credits

    def return_credits(self, link: SenderLink) -> None:
        """Give back what no transfer to this receiver can use now."""
        for (p_rank, d_rank), count in link.credits.items():
            if count:
                link.credits[(p_rank, d_rank)] = 0
                message = wire.Credit(
                    p_rank=p_rank, d_rank=d_rank, credits=count, epoch=link.pairs.epoch, returned=True
                )
                self._context.link.send(link.peer.boot, message)

    # --- payloads ---------------------------------------------------------------------------------------------------

    def can_send(self, link: SenderLink, ranks: tuple[int, int]) -> bool:
        """Whether a credit and a send slot are there."""
        return link.credits.get(ranks, 0) > 0 and bool(self._free_slots[ranks[0]])

    def send(self, link: SenderLink, tid: str, chunk: NextChunk, blocks: list[int]) -> None:
        """Announce a chunk and have it sent; `blocks` hold its content now."""
        settings, stream, piece = self._context.settings, chunk.stream, chunk.piece
        ranks = (stream.p_rank, stream.d_rank)
        pair = PairId(settings.boot, link.peer.boot, *ranks, link.pairs.epoch)
        pair_seq, num_bytes = link.next_seq[ranks], chunk_bytes(stream, piece, settings.layout)
        slot = self._free_slots[stream.p_rank].pop()
        link.credits[ranks] -= 1
        link.next_seq[ranks] += 1
        pin, self._next_pin = self._next_pin, self._next_pin - 1
        self._context.scheduler.pool.take(blocks, Owner.SEND_PIN, pin)
        self._flights[(pair, pair_seq)] = Flight(tid=tid, blocks=blocks, pin=pin, slot=slot, num_bytes=num_bytes)
        self._context.link.send(
            link.peer.boot,
            wire.Chunk(
                tid=tid,
                seq=chunk.seq,
                pair_seq=pair_seq,
                p_rank=stream.p_rank,
                d_rank=stream.d_rank,
                block_start=piece.block_start,
                block_stop=piece.block_stop,
                layer_start=piece.layer_start,
                layer_stop=piece.layer_stop,
                head_start=stream.head_start,
                head_stop=stream.head_stop,
                num_bytes=num_bytes,
                epoch=link.pairs.epoch,
            ),
        )
        first_head, _ = heads_of_rank(stream.p_rank, settings.tensor_parallel, settings.layout.num_kv_heads)
        command = Send(
            pair,
            pair_seq=pair_seq,
            slot=slot,
            num_bytes=num_bytes,
            mark=transfer_mark(tid),
            blocks=np.asarray(blocks, dtype="<i4").tobytes(),
            layer_start=piece.layer_start,
            layer_stop=piece.layer_stop,
            head_start=stream.head_start - first_head,
            head_stop=stream.head_stop - first_head,
        )
        self._context.ranks.post(stream.p_rank, command)

    def cancel(self, tid: str) -> None:
        """Take back what of a transfer has not begun to travel."""
        for (pair, pair_seq), flight in self._flights.items():
            if flight.tid == tid:
                self._context.ranks.post(pair.p_rank, CancelSend(pair, pair_seq))

    def posted(self, boot: str, message: wire.Posted) -> None:
        """The receiver waits for a payload (transports that need to know)."""
        settings = self._context.settings
        pair = PairId(settings.boot, boot, message.p_rank, message.d_rank, message.epoch)
        if (pair, message.pair_seq) in self._flights:
            self._context.ranks.post(message.p_rank, Launch(pair, message.pair_seq))

    def on_event(self, event: AnyEvent) -> Flight | None:
        """A rank reported something about a pair on which this engine sends; the flight that ended, if one did."""
        match event:
            case PairOpened(pair):
                if (link := self._links.get(pair.d_boot)) is not None:
                    self._carry_out(link, link.pairs.opened(pair.epoch))
            case PairBroken(pair, reason):
                if (link := self._links.get(pair.d_boot)) is not None:
                    log.warning("pair broke peer=%s epoch=%d reason=%s", pair.d_boot, pair.epoch, reason)
                    self._carry_out(link, link.pairs.failed(pair.epoch, reason))
            case PayloadSent(pair, pair_seq, is_ok):
                flight = self._flights.pop((pair, pair_seq))
                self._free_slots[pair.p_rank].append(flight.slot)
                self._context.scheduler.pool.release(flight.blocks, flight.pin)
                if is_ok:
                    self._context.counters.transfer_bytes_out += flight.num_bytes
                return flight
            case _:
                raise AssertionError(f"a sending rank does not report {event}")
        return None
