"""The transfer service: what the core calls to ferry KV in and out, all on the core's thread.

It routes wire messages and rank events to the two sides, `receiving` (this engine decodes) and `sending` (this engine
prefills for another); neither blocks. Payloads travel in the ranks' transport threads, whose completions wake the core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry_engine.kv_cache.auditor import TransferClaim
from kvferry_engine.kv_cache.block_pool import Owner
from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.scheduler.plan import SequenceUpdate
from kvferry_engine.transfer.peers import Peers
from kvferry_engine.transfer.ports import TransferContext
from kvferry_engine.transfer.receiving import Receiving
from kvferry_engine.transfer.sending import Sending
from kvferry_engine.wire import messages as wire

log = logging.getLogger(__name__)


class TransferService:
    """KV transfer of one engine, in both directions. `clock` is the core's; methods without `now` read it."""

    def __init__(self, context: TransferContext, *, clock: Callable[[], float]) -> None:
        self._context = context
        self._clock = clock
        self._peers = Peers(context.settings)
        self._receiving = Receiving(context, self._peers)
        self._sending = Sending(context, self._peers)

    # --- the core's calls -------------------------------------------------------------------------------------------

    def start_remote(self, sequence: Sequence, hints: list[wire.PrefillHint], *, force: bool, now: float) -> bool:
        """Begin to ferry a new sequence's prompt; False: too little is missing or nobody to ask, queue it as usual.

        True: the scheduler holds the sequence as REMOTE until `finish_remote`, which this service calls in any case that is
        not an abort.
        """
        is_started = self._receiving.start(sequence, hints, force=force, now=now)
        if is_started:
            self._settle(now)
        return is_started

    def handle_message(self, boot: str, message: wire.Body, now: float) -> None:
        """Take a transfer message of a peer; others are ignored."""
        match message:
            case wire.Join():
                peer = self._peers.get(boot)
                if peer is not None:
                    self._sending.outbound.join(peer, message)
            case wire.JoinOk():
                self._receiving.inbound.join_ok(boot, message, now)
            case wire.PairClosed(by_receiver=True):
                self._sending.outbound.peer_closed(boot, message)
            case wire.PairClosed():
                self._receiving.inbound.peer_closed(boot, message, now)
            case wire.Credit(returned=True):
                self._receiving.inbound.credit_returned(boot, message)
            case wire.Credit():
                self._sending.outbound.credit(boot, message)
            case wire.Prefill():
                self._sending.prefill(boot, message, now)
            case wire.Grant() | wire.Close():
                self._sending.handle(boot, message, now)
            case wire.Chunk():
                self._receiving.inbound.announce(boot, message, now)
            case wire.Posted():
                self._sending.outbound.posted(boot, message)
            case wire.Queued() | wire.Busy() | wire.Reject() | wire.Start() | wire.Done() | wire.AbortAck():
                self._receiving.handle(boot, message, now)
            case wire.TransferAbort():
                # Ids begin with the boot of the receiver that made them.
                side = self._receiving if message.tid.startswith(f"{self._context.settings.boot}:") else self._sending
                side.handle(boot, message, now)
            case _:
                return
        self._settle(now)

    def poll(self, now: float) -> None:
        """Take completions (which verifies and scatters what arrived), then look at the clock. Call once per turn."""
        self._settle(now)
        self._receiving.tick(now)
        self._sending.tick(now)
        self._settle(now)

    def on_updates(self, updates: list[SequenceUpdate], now: float) -> None:
        """Take the scheduler's news: finished blocks of PREFILL sequences may travel, ended sequences want nothing more.

        What `Scheduler.schedule` made (`drain_updates`) belongs here before the step is launched: it says which PREFILL
        sequences start, so that receivers reserve room while the step computes.
        """
        for update in updates:
            if update.finish is not None and update.sequence.purpose is Purpose.GENERATE:
                self._receiving.abort(update.sequence.handle, update.finish.message or "ended", now)
        self._sending.on_updates(updates, now)
        self._settle(now)

    def abort(self, sequence: Sequence, now: float) -> None:
        """The owner gave a sequence up; call before the scheduler frees its blocks."""
        self._receiving.abort(sequence.handle, "aborted", now)
        self._settle(now)

    def peer_up(self, boot: str, hello: wire.Hello, address: str) -> None:
        """A peer engine said HELLO; `address` is what was dialled, empty when it dialled this engine."""
        now = self._clock()
        peer = self._peers.up(boot, hello, address)
        if peer.refusal:
            log.warning("no KV with peer boot=%s name=%s reason=%s", boot, peer.name, peer.refusal)
        self._receiving.peer_up(boot, now)
        self._settle(now)

    def peer_down(self, boot: str) -> None:
        """A peer engine is gone: its transfers end, what arrived is kept."""
        now = self._clock()
        self._peers.down(boot)
        self._receiving.peer_down(boot, now)
        self._sending.peer_down(boot, now)
        self._settle(now)

    def report(self, sequence: Sequence, report: wire.PromptReport) -> None:
        """Fill in engine, bytes and exposed seconds of a ferried prompt."""
        ferried = self._receiving.report(sequence.handle)
        if ferried is None:
            return
        report.prefill_engine = ferried.peer_name
        report.remote_bytes = ferried.num_bytes
        report.transfer_s = ferried.exposed_s

    def is_busy(self) -> bool:
        """Transfers are under way: completions and messages will come, timers run."""
        return self._receiving.is_busy or self._sending.is_busy

    def next_timer_s(self, now: float) -> float | None:
        """Seconds until `poll` is due even if nothing happens; None when no timer runs."""
        timers = [*self._receiving.next_timers(), *self._sending.next_timers()]
        return max(min(timers) - now, 0.0) if timers else None

    @property
    def num_slots_in_use(self) -> int:
        """Receive slots with a payload plus chunks on their way out, over all ranks; 0 when nothing is under way."""
        settings = self._context.settings
        num_receive_slots = settings.num_receive_slots * settings.tensor_parallel
        return num_receive_slots - self._receiving.inbound.num_free_slots + len(self._sending.outbound.pinned)

    @property
    def bytes_per_s(self) -> float:
        """Moving average over transfers into this engine."""
        return self._receiving.bytes_per_s

    def claims(self) -> list[TransferClaim]:
        """Blocks held by transfers themselves, for the auditor."""
        return [
            TransferClaim(owner=Owner.SEND_PIN, owner_id=pin, blocks=blocks)
            for pin, blocks in self._sending.outbound.pinned
        ]

    def close(self) -> None:
        """Close all pairs; peers notice by themselves."""
        self._context.ranks.close()

    # --- events -----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Work through what ranks report, and its consequences, until nothing is left."""
        self._receiving.settle(now)
        self._sending.settle(now)
        while events := self._context.ranks.drain():
            for event in events:
                if event.pair.d_boot == self._context.settings.boot:
                    self._receiving.inbound.on_event(event, now)
                    continue
                flight = self._sending.outbound.on_event(event)
                if flight is not None:
                    self._sending.flight_ended(flight.tid, now)
            self._receiving.settle(now)
            self._sending.settle(now)
