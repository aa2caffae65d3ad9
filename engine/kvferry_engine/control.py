"""Connects the core to the wire: each message to the part that answers it, cache events and lifecycle words to the routers.

Runs on the core's thread; `network` owns the sockets, `main` the process.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry_engine.core import EngineCore
from kvferry_engine.health import Probe
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.network import SAID_BYE, InboxItem, Network, PeerDown, PeerUp, Received
from kvferry_engine.transfer.service import TransferService
from kvferry_engine.wire import messages as wire

log = logging.getLogger(__name__)

ASSET_PIECE_BYTES = 1 << 20
ROUTER_GRACE_S = 5.0
"""How long requests of a router whose connection broke go on without it: it may come back and ask for what it missed."""
TRANSFER_MESSAGES = (
    wire.Join, wire.JoinOk, wire.Prefill, wire.Queued, wire.Busy, wire.Reject, wire.Start, wire.Grant, wire.Chunk, wire.Posted,
    wire.Credit, wire.Done, wire.Close, wire.TransferAbort, wire.AbortAck, wire.PairClosed,
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class EngineIdentity:
    """What an engine says about itself; role and state may change while it runs."""

    boot: str
    service: str
    store_address: str
    role: wire.Role
    name: str = ""
    address: str = ""
    """Name and address are known once the wire has its port."""
    model: wire.ModelInfo | None = None
    """None while the model loads; nobody is answered before."""
    is_draining: bool = False
    state: wire.State = field(default_factory=lambda: wire.State(version=0))

    def hello(self) -> wire.Hello:
        """The HELLO of this moment."""
        return wire.Hello(
            kind=wire.PeerKind.ENGINE,
            boot=self.boot,
            name=self.name,
            service=self.service,
            role=self.role,
            address=self.address,
            store_address=self.store_address,
            model=self.model,
            state_version=self.state.version,
            draining=self.is_draining,
        )


class Control:
    """Dispatches the inbox. `routers` are the boots of live routers."""

    def __init__(
        self,
        *,
        core: EngineCore,
        network: Network,
        identity: EngineIdentity,
        index: PrefixIndex,
        transfer: TransferService,
        assets: bytes,
        probe: Probe,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._network = network
        self._identity = identity
        self._index = index
        self._transfer = transfer
        self._assets = assets
        self._probe = probe
        self._clock = clock
        self._events_number = 0
        self.routers: set[str] = set()
        self._lost_routers: dict[str, float] = {}
        """Boot to the time at which its requests are given up."""

    def drain(self, timeout_s: float) -> None:
        """Handle everything in the inbox; block up to `timeout_s` for the first item."""
        try:
            item = self._network.inbox.get(timeout=timeout_s) if timeout_s > 0 else self._network.inbox.get_nowait()
            while True:
                self._handle(item)
                item = self._network.inbox.get_nowait()
        except queue.Empty:
            return

    def publish_events(self) -> None:
        """Tell routers which blocks came and went since the last call."""
        stored, removed = self._index.drain_events()
        if not stored and not removed:
            return
        self._events_number += 1
        for router in self.routers:
            self._network.send(router, wire.Events(number=self._events_number, stored=stored, removed=removed))

    def announce_drain(self) -> None:
        """Refuse new work and ask the routers to continue everything elsewhere."""
        self._identity.is_draining = True
        self._core.is_draining = True
        for router in self.routers:
            self._network.send(router, wire.Drain())
        for origin, rid, attempt in self._core.requests():
            if origin in self.routers:
                self._network.send(origin, wire.Handoff(rid=rid, attempt=attempt))

    def _handle(self, item: InboxItem) -> None:
        match item:
            case Received(boot, message):
                self._handle_message(boot, message)
            case PeerUp(boot, hello, address):
                self._peer_up(boot, hello, address)
            case PeerDown("", reason):
                self._probe.failure = reason
            case PeerDown(boot, reason):
                self._peer_down(boot, reason)
            case _:
                return

    def _peer_up(self, boot: str, hello: wire.Hello, address: str) -> None:
        if hello.kind is wire.PeerKind.ENGINE:
            self._transfer.peer_up(boot, hello, address)
            return
        is_new = boot not in self.routers
        self.routers.add(boot)
        self._lost_routers.pop(boot, None)
        self._probe.has_met_router = True
        if hello.state_version < self._identity.state.version:
            self._network.send(boot, self._identity.state)
        self._send_snapshot(boot)
        if is_new:
            log.info("router joined boot=%s name=%s", boot, hello.name)

    def _peer_down(self, boot: str, reason: str) -> None:
        if boot not in self.routers:
            self._transfer.peer_down(boot)
            return
        self.routers.discard(boot)
        log.info("router gone boot=%s reason=%s", boot, reason)
        if reason == SAID_BYE:
            self._core.abort_origin(boot)
        else:
            self._lost_routers[boot] = self._clock() + ROUTER_GRACE_S

    def give_up_lost_routers(self) -> None:
        """Abort what routers asked for that have not come back in time."""
        now = self._clock()
        for boot, deadline_s in list(self._lost_routers.items()):
            if now >= deadline_s:
                del self._lost_routers[boot]
                self._core.abort_origin(boot)

    def _handle_message(self, boot: str, message: wire.Body) -> None:
        match message:
            case wire.Submit():
                self._submit(boot, message)
            case wire.Abort():
                self._core.abort(message.rid, message.indices)
            case wire.Resume():
                self._network.send(boot, self._core.resume(boot, message))
            case wire.EventsSnapshot():
                self._send_snapshot(boot)
            case wire.AssetsRequest():
                self._send_assets(boot, message)
            case wire.SetRole():
                self._identity.role = message.role
                log.info("role set role=%s by=%s", message.role, boot)
            case wire.State():
                if message.version > self._identity.state.version:
                    self._identity.state = message
            case wire.Admin():
                self._network.send(boot, self._admin(message))
            case _ if isinstance(message, TRANSFER_MESSAGES):
                self._transfer.handle_message(boot, message, self._clock())
            case _:
                log.debug("ignored message kind=%s peer=%s", type(message).__name__, boot)

    def _submit(self, boot: str, message: wire.Submit) -> None:
        if message.engine_boot != self._identity.boot:
            answer: wire.Accepted | wire.Rejected = wire.Rejected(
                rid=message.rid,
                attempt=message.attempt,
                code=wire.RejectCode.STALE,
                message="addressed to an earlier process",
            )
        else:
            answer = self._core.submit(boot, message)
        self._network.send(boot, answer)

    def _admin(self, message: wire.Admin) -> wire.AdminResult:
        if message.operation == "reset_prefix_cache":
            self._core.scheduler.drop_prefix_cache()
            return wire.AdminResult(id=message.id, ok=True)
        return wire.AdminResult(
            id=message.id, ok=False, message=f"unknown operation {message.operation!r}; known: reset_prefix_cache"
        )

    def _send_snapshot(self, boot: str) -> None:
        self.publish_events()
        self._network.send(boot, wire.Events(number=self._events_number, stored=self._index.snapshot(), snapshot=True))

    def _send_assets(self, boot: str, message: wire.AssetsRequest) -> None:
        model = self._identity.model
        digest = model.assets_digest if model is not None else ""
        piece = self._assets[message.offset : message.offset + ASSET_PIECE_BYTES] if message.digest == digest else b""
        total = len(self._assets) if message.digest == digest else 0
        self._network.send(
            boot, wire.Assets(digest=message.digest, offset=message.offset, total_bytes=total, data=piece)
        )
