"""The prefill engine's side of transfers: takes PREFILL, has prompts computed, and feeds finished blocks to `outbound`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry_engine.errors import RequestError
from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.scheduler.plan import SequenceUpdate
from kvferry_engine.transfer.outbound import Outbound, SenderLink
from kvferry_engine.transfer.peers import Peers
from kvferry_engine.transfer.ports import TransferContext
from kvferry_engine.transfer.protocol.actions import (
    Action,
    Cached,
    CancelSends,
    ComputeFailed,
    Evicted,
    Granted,
    PeerLost,
    Progress,
    SenderEvent,
    Sent,
    StopCompute,
    Tell,
    Tick,
)
from kvferry_engine.transfer.protocol.fairness import urgency
from kvferry_engine.transfer.protocol.sender import NextChunk, Sender, SenderState
from kvferry_engine.transfer.protocol.slices import ChunkRange
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.hashing import chain_hashes, namespace_root

log = logging.getLogger(__name__)

SenderMessage = wire.Grant | wire.Close | wire.TransferAbort


@dataclass(eq=False, slots=True, kw_only=True)
class Outgoing:
    """One PREFILL. `hashes` of all blocks up to the last one wanted; `handle` 0 when nothing had to be computed."""

    sender: Sender
    hashes: list[bytes] = field(repr=False)
    sequence: Sequence | None = None
    is_granted: bool = False
    """GRANT came; this end's groups may still be opening."""


class Sending:
    """All transfers out of this engine."""

    def __init__(self, context: TransferContext, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._transfers: dict[str, Outgoing] = {}
        self._by_handle: dict[int, Outgoing] = {}
        self.outbound = Outbound(context)

    @property
    def is_busy(self) -> bool:
        return bool(self._transfers) or self.outbound.is_busy

    def next_timers(self) -> Iterable[float]:
        timers = (transfer.sender.next_timer_s() for transfer in self._transfers.values())
        return (timer for timer in timers if timer is not None)

    # --- messages ---------------------------------------------------------------------------------------------------

    def prefill(self, boot: str, message: wire.Prefill, now: float) -> None:
        """PREFILL arrived: queue the prompt, or start at once with what is cached."""
        if message.tid in self._transfers:
            return
        settings = self._context.settings
        block_size = settings.layout.block_size
        refusal = self._refusal(boot, message)
        if refusal:
            self._context.link.send(boot, wire.Reject(tid=message.tid, message=refusal))
            return
        estimate_s = self._context.estimate_start_s()
        if estimate_s > settings.max_start_s:
            self._context.link.send(boot, wire.Busy(tid=message.tid, retry_after_s=estimate_s - settings.max_start_s))
            return
        root = message.root or namespace_root(message.lora_digest)
        have, want = message.have // block_size, message.upto // block_size
        transfer = Outgoing(
            sender=Sender(
                tid=message.tid,
                boot=boot,
                have_blocks=have,
                want_blocks=want,
                block_size=block_size,
                times=settings.times,
            ),
            hashes=chain_hashes(message.prompt_ids, block_size, root, stop_block=want),
        )
        self._transfers[message.tid] = transfer
        num_cached = have + len(self._context.index.lookup(transfer.hashes[have:]))
        if num_cached >= want:
            self._context.link.send(boot, wire.Queued(tid=message.tid))
            self._feed(transfer, Progress(want, is_finished=True, cached_tokens=message.upto), now)
            return
        if self._queue(transfer, message, root, estimate_s, now) and num_cached > have:
            self._feed(transfer, Cached(num_cached), now)

    def _refusal(self, boot: str, message: wire.Prefill) -> str:
        block_size = self._context.settings.layout.block_size
        peer = self._peers.get(boot)
        if peer is None or peer.refusal:
            return "no HELLO from this peer" if peer is None else peer.refusal
        if len(message.prompt_ids) % 4:
            return "the column of token ids is torn"
        ids = np.frombuffer(message.prompt_ids, dtype="<i4")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._context.settings.vocab_size:
            return f"token ids outside the vocabulary of {self._context.settings.vocab_size}"
        num_ids = len(ids)
        is_aligned = not message.have % block_size and not message.upto % block_size
        if not is_aligned or not 0 <= message.have < message.upto < num_ids:
            asked = f"tokens {message.have} to {message.upto} of {num_ids}"
            return f"{asked} are not full blocks of {block_size} before the last token"
        return ""

    def _queue(self, transfer: Outgoing, message: wire.Prefill, root: bytes, estimate_s: float, now: float) -> bool:
        """Give the prompt to the scheduler; False when it can never run here (the peer is told)."""
        tokens = np.frombuffer(message.prompt_ids, dtype="<i4").astype(np.int32)
        sequence = Sequence(
            rid=message.tid,
            index=0,
            handle=self._context.next_handle(),
            tokens=tokens,
            num_prompt=len(tokens),
            num_tokens=len(tokens),
            sampling=wire.Sampling(max_tokens=1),
            seed=0,
            root=root,
            purpose=Purpose.PREFILL,
            upto=message.upto,
            priority=message.priority,
            arrival_s=now,
            deadline_s=None if message.remaining_s is None else now + message.remaining_s,
        )
        boot = transfer.sender.boot
        transfer.sequence = sequence
        self._by_handle[sequence.handle] = transfer
        try:
            update = self._context.scheduler.add(sequence, now)
        except RequestError as error:
            del self._by_handle[sequence.handle], self._transfers[message.tid]
            self._context.link.send(boot, wire.Reject(tid=message.tid, message=str(error)))
            return False
        self._context.link.send(boot, wire.Queued(tid=message.tid, est_start_s=estimate_s))
        if update is not None:
            self.on_updates([update], now)
        return True

    def handle(self, boot: str, message: SenderMessage, now: float) -> None:
        """A message about one transfer."""
        transfer = self._transfers.get(message.tid)
        if transfer is None or transfer.sender.boot != boot:
            if isinstance(message, wire.TransferAbort):
                self._context.link.send(boot, wire.AbortAck(tid=message.tid))
            elif isinstance(message, wire.Grant):
                self._context.refuse_unknown(boot, message.tid)
            return
        if not isinstance(message, wire.Grant):
            self._feed(transfer, message, now)
            return
        transfer.is_granted = True
        link = self.outbound.open_link(boot)
        if link is not None:
            self._grant(transfer, link, now)

    def _grant(self, transfer: Outgoing, link: SenderLink, now: float) -> None:
        self._feed(transfer, Granted(link.streams, self._context.settings.layout.num_layers), now)

    # --- local facts ------------------------------------------------------------------------------------------------

    def on_updates(self, updates: list[SequenceUpdate], now: float) -> None:
        """Prompts are about to start, have more blocks with KV, or ended."""
        block_size = self._context.settings.layout.block_size
        for update in updates:
            sequence = update.sequence
            transfer = self._by_handle.get(sequence.handle)
            if transfer is None:
                continue
            if update.finish is None:
                event: SenderEvent = Progress(update.num_computed // block_size, False, sequence.num_cached)
            elif update.finish.reason is wire.FinishReason.STOP:
                event = Progress(sequence.upto // block_size, True, sequence.num_cached)
            else:
                event = ComputeFailed(update.finish.message or update.finish.reason.value)
            if update.finish is not None:
                del self._by_handle[sequence.handle]
                transfer.sequence = None
            self._feed(transfer, event, now)

    def peer_down(self, boot: str, now: float) -> None:
        self.outbound.peer_down(boot)
        self._lose(boot, "peer gone", now, is_dead=True)

    def tick(self, now: float) -> None:
        for transfer in list(self._transfers.values()):
            timer = transfer.sender.next_timer_s()
            if timer is not None and now >= timer:
                self._feed(transfer, Tick(), now)
        self.settle(now)

    def flight_ended(self, tid: str, now: float) -> None:
        """A chunk of this transfer left or was lost."""
        self._feed(self._transfers[tid], Sent(), now)

    def settle(self, now: float) -> None:
        """Pass on what became of pair groups, send what can be sent, give back credits nobody needs."""
        for change in self.outbound.drain_changes():
            if change.reason is not None:
                self._lose(change.boot, change.reason, now, is_dead=False)
                continue
            link = self.outbound.open_link(change.boot)
            for transfer in self._to(change.boot):
                if transfer.is_granted and link is not None:
                    self._grant(transfer, link, now)
        for link in self.outbound.open_links():
            transfers = self._to(link.peer.boot)
            for ranks in link.ranks:
                self._pump(link, ranks, transfers, now)
            if not any(transfer.sender.is_live for transfer in transfers):
                self.outbound.return_credits(link)

    # --- the machines -----------------------------------------------------------------------------------------------

    def _pump(self, link: SenderLink, ranks: tuple[int, int], transfers: list[Outgoing], now: float) -> None:
        """Send chunks on one rank pair while credits and slots last, least work left first."""
        while self.outbound.can_send(link, ranks):
            sending = [transfer for transfer in transfers if transfer.sender.state is SenderState.SENDING]
            for transfer in sorted(sending, key=lambda each: (urgency(each.sender, now), each.sender.tid)):
                chunk = transfer.sender.next_chunk(ranks, link.shapes.__getitem__)
                if chunk is not None and self._send(link, transfer, chunk, now):
                    break
            else:
                return

    def _send(self, link: SenderLink, transfer: Outgoing, chunk: NextChunk, now: float) -> bool:
        """Pin and send a chunk, or as many of its first blocks as are still cached; False when not even one is."""
        piece = chunk.piece
        blocks = self._context.index.lookup(transfer.hashes[piece.block_start : piece.block_stop])
        num_wanted = piece.block_stop - piece.block_start
        is_whole = len(blocks) == num_wanted
        if not blocks or (not is_whole and piece.layer_start > 0):
            self._feed(transfer, Evicted(piece.block_start), now)
            return False
        if not is_whole:
            stop = piece.block_start + len(blocks)
            chunk = NextChunk(
                chunk.stream, ChunkRange(piece.block_start, stop, piece.layer_start, piece.layer_stop), chunk.seq
            )
        self.outbound.send(link, transfer.sender.tid, chunk, blocks)
        self._carry_out_all(transfer, transfer.sender.announce(chunk, now), now)
        return True

    def _feed(self, transfer: Outgoing, event: SenderEvent, now: float) -> None:
        self._carry_out_all(transfer, transfer.sender.handle(event, now), now)
        if transfer.sender.is_over:
            self._transfers.pop(transfer.sender.tid, None)

    def _carry_out_all(self, transfer: Outgoing, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Tell(boot, message):
                    if isinstance(message, wire.Done):
                        self._context.counters.transfers_out += 1
                    self._context.link.send(boot, message)
                case StopCompute(reason):
                    self._stop_compute(transfer, reason)
                case CancelSends():
                    self.outbound.cancel(transfer.sender.tid)
                case _:
                    raise AssertionError(f"a sender does not ask for {action}")

    def _stop_compute(self, transfer: Outgoing, reason: str) -> None:
        sequence, transfer.sequence = transfer.sequence, None
        if sequence is None:
            return
        del self._by_handle[sequence.handle]
        self._context.scheduler.abort(sequence.handle, reason)
        self._context.forget([sequence.handle])

    def _to(self, boot: str) -> list[Outgoing]:
        return [transfer for transfer in self._transfers.values() if transfer.sender.boot == boot]

    def _lose(self, boot: str, reason: str, now: float, *, is_dead: bool) -> None:
        for transfer in self._to(boot):
            transfer.is_granted = False
            self._feed(transfer, PeerLost(boot, reason, is_dead), now)
