"""The router's view of one engine address: one task that dials, says HELLO, beats, listens, and redials.

Everything about life and death of an engine is decided here, on the connection, never from DNS: TCP loss means dead for
new work at once; the same boot may come back within a short grace (its requests are then resumed), anything else ends
the boot. What the messages mean for requests is `routing.dispatcher`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from kvferry_engine.wire.messages import (
    WIRE_VERSION_MAX,
    WIRE_VERSION_MIN,
    AdminResult,
    Assets,
    Beat,
    Body,
    Bye,
    Counters,
    Drain,
    Envelope,
    Hello,
    Load,
    Message,
    ModelInfo,
    PeerKind,
    Role,
    Step,
    decode,
    encode,
)
from kvferry_server.engines.calls import PendingCalls
from kvferry_server.engines.link import Link, LinkError, LinkLostError, LinkRefusedError
from kvferry_server.engines.timings import LinkTimings, Silence, Verdict, backoff_s

logger = logging.getLogger(__name__)

_YIELD_EVERY = 64
"""Messages handled before other tasks get a turn: a full socket returns completed futures, which never yield."""


class EngineState(StrEnum):
    CONNECTING = "connecting"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """Who this router is in HELLO; `boot` is random per process and also the DEALER's identity."""

    boot: str
    name: str
    service: str = ""


class EngineListener(Protocol):
    """Told what happens to engines, in order, on the event loop; must not block (`EngineRegistry`).

    `state_version`: of the service state that this router holds, for HELLO. `connected_elsewhere`: whether another address
    already reaches this process.
    """

    @property
    def state_version(self) -> int: ...

    def connected_elsewhere(self, engine: EngineClient, boot: str) -> bool: ...

    def engine_up(self, engine: EngineClient, *, same_boot: bool) -> None:
        """HELLO is complete. `same_boot`: this process was connected before and was not declared dead in between."""

    def engine_lost(self, engine: EngineClient) -> None:
        """The connection broke; the boot may still come back (`engine_up`) or not (`engine_dead`)."""

    def engine_dead(self, engine: EngineClient, boot: str, *, deliberate: bool) -> None:
        """Nothing will be resumed from this boot. `deliberate`: it said BYE."""

    def engine_changed(self, engine: EngineClient) -> None:
        """State, role, model or draining changed."""

    def engine_message(self, engine: EngineClient, body: Message) -> None:
        """A message about requests, the cache or state arrived (BEAT and STEP included)."""


class HelloRefusedError(LinkError):
    """The peer is not an engine we may use."""


class AliasError(LinkError):
    """The process behind this address is already connected by another address."""

    def __init__(self, boot: str) -> None:
        super().__init__("the same engine is connected by another address")
        self.boot = boot


class EngineGoneError(LinkError):
    """The engine said BYE."""


class EngineSilentError(LinkError):
    """Nothing was heard for `dead_s`."""


class EngineClient:
    """One engine address. Attributes are for reading; `run` is the task, `close` ends it."""

    def __init__(
        self,
        address: str,
        *,
        identity: RouterIdentity,
        dial: Callable[[str, float], Awaitable[Link]],
        listener: EngineListener,
        timings: LinkTimings,
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.boot = ""
        self.hello: Hello | None = None
        self.role = Role.BOTH
        self.load = Load()
        self.counters = Counters()
        self.cordoned = False
        self.state = EngineState.CONNECTING
        self.reason = "dialling"
        self.state_version = 0
        self.num_stray = 0
        """Messages dropped because source, destination or number did not fit."""
        self._identity = identity
        self._dial = dial
        self._listener = listener
        self._timings = timings
        self._clock = clock
        self._link: Link | None = None
        self._silence = Silence(timings, clock())
        self._sent = 0
        self._received = -1
        self._up = False
        self._grace: asyncio.TimerHandle | None = None
        self._calls = PendingCalls(send=self.send, why=lambda: self.reason, caller=identity.boot)
        self._closing = False
        self._departed = ""
        """The last boot that said BYE: it may still answer for a moment."""

    @property
    def name(self) -> str:
        """What the engine calls itself; its address before the first HELLO."""
        return self.hello.name if self.hello is not None and self.hello.name else self.address

    @property
    def model(self) -> ModelInfo | None:
        return self.hello.model if self.hello is not None else None

    @property
    def peer_address(self) -> str:
        """host:port that other engines dial."""
        return self.hello.address if self.hello is not None and self.hello.address else self.address

    @property
    def connected(self) -> bool:
        """HELLO is complete on a connection that has not broken."""
        return self._up

    @property
    def takes_new_work(self) -> bool:
        """Live, not draining, not cordoned, model loaded, and its socket has room."""
        has_room = self._link is not None and self._link.num_unsent == 0
        return self.state is EngineState.LIVE and self.model is not None and not self.cordoned and has_room

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, body: Body) -> bool:
        """Send a message to the current boot. Returns False when there is no connection (nothing is kept then)."""
        if not self._up or self._link is None:
            return False
        self._transmit(self._link, body, self.boot)
        return True

    def _transmit(self, link: Link, body: Body, boot: str) -> None:
        envelope = Envelope(src=self._identity.boot, dst=boot, seq=self._sent, body=body)
        self._sent += 1
        link.send(encode(envelope))

    async def admin(self, operation: str, arguments: dict[str, object], timeout_s: float) -> AdminResult:
        """Run one ADMIN operation and return its result; no connection and no answer are results too."""
        return await self._calls.admin(operation, arguments, timeout_s)

    async def set_role(self, role: Role, timeout_s: float) -> AdminResult:
        """Send SET_ROLE and wait until a BEAT tells the new role."""
        return await self._calls.set_role(role, timeout_s)

    async def fetch_piece(self, digest: str, offset: int) -> Assets:
        """Ask for the piece of the asset bundle that starts at `offset`. Raises LinkError."""
        return await self._calls.fetch_piece(digest, offset, self._timings.assets_s)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection to the address until `close`; the whole life of this object runs in here."""
        num_failures = 0
        while not self._closing:
            was_up = False
            pause_s: float | None = None
            try:
                await self._session()
            except LinkError as error:
                was_up = self._up
                if isinstance(error, HelloRefusedError):
                    pause_s = self._timings.refused_hello_s
                elif isinstance(error, EngineGoneError):
                    pause_s = self._timings.backoff_max_s
                self._session_over(error)
                if isinstance(error, AliasError):
                    await self._wait_until_needed(error.boot)
            except Exception as error:
                # The task's edge: one engine's nonsense must not end its redialling.
                was_up = self._up
                logger.exception("connection failed: engine=%s address=%s", self.name, self.address)
                self._session_over(LinkLostError(f"internal error: {type(error).__name__}"))
            num_failures = 0 if was_up else num_failures + 1
            if not self._closing:
                await asyncio.sleep(backoff_s(self._timings, num_failures) if pause_s is None else pause_s)

    async def _wait_until_needed(self, boot: str) -> None:
        """Dialling again would take the connection away from the other address, so wait until that one is gone."""
        while self._listener.connected_elsewhere(self, boot) and not self._closing:
            await asyncio.sleep(self._timings.beat_s)

    def close(self, reason: str) -> None:
        """Stop using the address: the boot is over and `run` returns. Cancel the task afterwards."""
        self._closing = True
        if self._up:
            self.send(Bye())
        self._up = False
        self._boot_over(reason, deliberate=True)
        self._enter(EngineState.GONE, reason)

    async def _session(self) -> None:
        link = await self._dial(self.address, self._timings.connect_s)
        try:
            self._sent = 0
            self._received = -1
            self._silence = Silence(self._timings, self._clock())
            self._link = link
            me = self._identity
            hello = Hello(kind=PeerKind.ROUTER, boot=me.boot, name=me.name, service=me.service)
            hello.state_version = self._listener.state_version
            self._transmit(link, hello, "")
            async with asyncio.TaskGroup() as group:
                for part in (self._read(link), self._beat(link), link.watch(), link.flush()):
                    group.create_task(part)
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, LinkLostError):
                self._read_leftovers(link)
            raise first from None
        finally:
            self._link = None
            link.close()

    async def _read(self, link: Link) -> None:
        handled = 0
        while True:
            data = await link.receive()
            self._silence.heard(self._clock())
            self._handle_frame(data)
            handled += 1
            if handled % _YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _read_leftovers(self, link: Link) -> None:
        """Handle what arrived before the loss: the last tokens, or the BYE that explains it."""
        for data in link.leftovers():
            self._handle_frame(data)

    async def _beat(self, link: Link) -> None:
        hello_deadline_s = self._clock() + self._timings.connect_s
        while True:
            await asyncio.sleep(self._timings.beat_s)
            now = self._clock()
            if not self._up:
                if now >= hello_deadline_s:
                    raise LinkRefusedError("connected, but no HELLO came")
                continue
            self._transmit(link, Beat(), self.boot)
            verdict = self._silence.tick(now)
            if verdict is Verdict.DEAD:
                raise EngineSilentError(f"silent for {self._timings.dead_s:g} s")
            self._refresh_state(suspect=verdict is Verdict.SUSPECT)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _handle_frame(self, data: bytes) -> None:
        try:
            envelope = decode(data)
        except msgspec.DecodeError as error:
            self.num_stray += 1
            logger.warning("message not understood: engine=%s error=%s", self.name, error)
            return
        self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        body = envelope.body
        if envelope.dst != self._identity.boot:
            self.num_stray += 1
            return
        if isinstance(body, Hello):
            self._received = envelope.seq
            self._greeted(body)
            return
        if not self._up or envelope.src != self.boot or envelope.seq <= self._received:
            self.num_stray += 1
            return
        if envelope.seq != self._received + 1:
            missing = envelope.seq - self._received - 1
            logger.warning("messages missing: engine=%s num_missing=%d", self.name, missing)
        self._received = envelope.seq
        if isinstance(body, Step):
            if body.load is not None:
                self.load = body.load
            self._listener.engine_message(self, body)
        elif isinstance(body, Beat):
            self._beaten(body)
        elif isinstance(body, AdminResult | Assets):
            self._calls.answered(body)
        elif isinstance(body, Drain):
            assert self.hello is not None
            self.hello = msgspec.structs.replace(self.hello, draining=True)
            self._refresh_state(suspect=False)
        elif isinstance(body, Bye):
            raise EngineGoneError("said BYE")
        else:
            self._listener.engine_message(self, body)

    def _greeted(self, hello: Hello) -> None:
        self._check_hello(hello)
        if self._listener.connected_elsewhere(self, hello.boot):
            raise AliasError(hello.boot)
        same_boot = hello.boot == self.boot
        if not same_boot:
            self._boot_over("a new process answers at its address", deliberate=False)
            self.boot = hello.boot
            self.load = Load()
            self.counters = Counters()
            self.cordoned = False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        again = self._up and same_boot
        self.hello = hello
        self.role = hello.role
        self.state_version = hello.state_version
        self._up = True
        self._refresh_state(suspect=False)
        if again:
            self._listener.engine_changed(self)
            return
        logger.info("engine up: engine=%s address=%s boot=%s role=%s", self.name, self.address, self.boot, self.role)
        self._listener.engine_up(self, same_boot=same_boot)

    def _check_hello(self, hello: Hello) -> None:
        if hello.boot == self._departed:
            raise HelloRefusedError("said BYE")
        if hello.kind is not PeerKind.ENGINE:
            raise HelloRefusedError(f"is a {hello.kind}, not an engine")
        mine, theirs = self._identity.service, hello.service
        if mine and theirs and mine != theirs:
            raise HelloRefusedError(f"belongs to service {theirs}, this router to {mine}")
        if min(hello.version_max, WIRE_VERSION_MAX) < max(hello.version_min, WIRE_VERSION_MIN):
            ours, its = f"{WIRE_VERSION_MIN}..{WIRE_VERSION_MAX}", f"{hello.version_min}..{hello.version_max}"
            raise HelloRefusedError(f"speaks wire versions {its}, this router {ours}")

    def _beaten(self, beat: Beat) -> None:
        assert self.hello is not None
        if beat.load is not None:
            self.load = beat.load
        if beat.counters is not None:
            self.counters = beat.counters
        draining = beat.draining or self.hello.draining
        role = beat.role or self.role
        if (draining, role, beat.cordoned) != (self.hello.draining, self.role, self.cordoned):
            self.hello = msgspec.structs.replace(self.hello, draining=draining)
            self.role = role
            self.cordoned = beat.cordoned
            self._listener.engine_changed(self)
        self._calls.answered(beat)
        self._refresh_state(suspect=False)
        self._listener.engine_message(self, beat)

    # --- state --------------------------------------------------------------------------------------------------------

    def _refresh_state(self, *, suspect: bool) -> None:
        if not self._up or self.hello is None:
            return
        if suspect:
            self._enter(EngineState.SUSPECT, f"silent for {self._timings.suspect_s:g} s")
        elif self.hello.draining:
            self._enter(EngineState.DRAINING, "draining")
        else:
            self._enter(EngineState.LIVE, "" if self.model is not None else "loading its model")

    def _enter(self, state: EngineState, reason: str) -> None:
        changed = state is not self.state
        self.state = state
        self.reason = reason
        if changed:
            logger.info("engine state: engine=%s state=%s reason=%s", self.name, state, reason or "-")
            self._listener.engine_changed(self)

    def _session_over(self, error: LinkError) -> None:
        """Turn the end of a connection into a state and, when nothing can come back, into the end of the boot."""
        was_up, self._up = self._up, False
        self._calls.fail(str(error))
        if isinstance(error, EngineGoneError):
            self._departed = self.boot
            self._enter(EngineState.GONE, str(error))
            self._boot_over(str(error), deliberate=True)
        elif isinstance(error, EngineSilentError | HelloRefusedError | AliasError | LinkRefusedError):
            if self.state is not EngineState.GONE:
                self._enter(EngineState.CONNECTING if self.hello is None else EngineState.DEAD, str(error))
            self._boot_over(str(error), deliberate=False)
        elif was_up:
            self._enter(EngineState.DEAD, str(error))
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._timings.resume_grace_s, self._boot_over, str(error))
            self._listener.engine_lost(self)

    def _boot_over(self, reason: str, *, deliberate: bool = False) -> None:
        """The boot known so far will not be resumed: tell the listener once."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        boot, self.boot = self.boot, ""
        if boot:
            level = logging.INFO if deliberate else logging.WARNING
            logger.log(
                level, "engine over: engine=%s address=%s boot=%s reason=%s", self.name, self.address, boot, reason
            )
            self._listener.engine_dead(self, boot, deliberate=deliberate)
