"""One ZeroMQ connection to one address, from dial to loss; a lost link is closed and never reused.

libzmq's own reconnect is not used: a redial is a new socket and a new HELLO, so nothing queued for an earlier process can
reach a later one, and the moment of loss is known. `client` decides what a loss means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvferry_engine.wire import sockets
from kvferry_engine.wire.sockets import WireKeys

ZmqContext = zmq.Context[zmq.Socket[bytes]]

_NEVER_MS = 3_600_000

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKE_FAILURES = frozenset(
    (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)


class LinkError(Exception):
    """The connection cannot be used (any more)."""


class LinkRefusedError(LinkError):
    """Nobody listens at the address, or the peer does not speak our protocol or secret."""


class LinkLostError(LinkError):
    """An established connection broke."""


class HandshakeError(LinkRefusedError):
    """The peer closed the connection during the CURVE or ZMTP handshake."""


class KeyRing:
    """The wire keys to try, the one that worked last first: during a rotation engines may still have the other one."""

    def __init__(self, keys: Sequence[WireKeys]) -> None:
        self._keys: list[WireKeys | None] = list(keys) or [None]

    def in_order(self) -> list[WireKeys | None]:
        return list(self._keys)

    def worked(self, keys: WireKeys | None) -> None:
        self._keys.sort(key=lambda other: other != keys)


async def open_link(context: ZmqContext, address: str, *, identity: bytes, ring: KeyRing, timeout_s: float) -> Link:
    """Connect to host:port with the keys of `ring` in turn. Raises LinkRefusedError, also after `timeout_s` per key."""
    refusal: HandshakeError | None = None
    for keys in ring.in_order():
        link = Link(context, address, identity=identity, keys=keys)
        try:
            await link.open(timeout_s)
        except HandshakeError as error:
            link.close()
            refusal = error
        except BaseException:
            link.close()
            raise
        else:
            ring.worked(keys)
            return link
    assert refusal is not None
    raise refusal


class Link:
    """A DEALER connected to one engine. Sending never blocks or drops: what does not fit waits here, in order."""

    def __init__(self, context: ZmqContext, address: str, *, identity: bytes, keys: WireKeys | None) -> None:
        self._address = address
        self._is_secure = keys is not None
        self._plain: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        sockets.prepare(self._plain)
        # With IMMEDIATE, and also with RECONNECT_IVL -1, libzmq 4.3 throws away at the loss what arrived and was not read
        # yet: the last tokens, or a BYE. So neither is used: nothing is sent before the handshake, and a lost socket is
        # closed long before it would redial.
        self._plain.setsockopt(zmq.IMMEDIATE, 0)
        self._plain.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._plain.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        self._plain.setsockopt(zmq.IDENTITY, identity)
        if address.startswith("["):
            self._plain.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            sockets.secure_client(self._plain, keys)
        self._monitor_plain = self._plain.get_monitor_socket(_WATCHED)
        self._monitor = zmq.asyncio.Socket.from_socket(self._monitor_plain)
        self._socket = zmq.asyncio.Socket.from_socket(self._plain)
        self._incoming: asyncio.Future[bytes] | None = None
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()

    @property
    def num_unsent(self) -> int:
        """Messages that the peer's connection had no room for yet."""
        return len(self._outbox)

    async def open(self, timeout_s: float) -> None:
        """Connect and shake hands. Raises LinkRefusedError, also after `timeout_s`."""
        try:
            self._plain.connect(f"tcp://{self._address}")
        except zmq.ZMQError as error:
            raise LinkRefusedError(f"{self._address} is no address to dial: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                await self._shake_hands()
        except TimeoutError as error:
            raise LinkRefusedError(f"no answer within {timeout_s:g} s") from error

    async def _shake_hands(self) -> None:
        while True:
            event = await self._next_event()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not self._is_secure:
                # A process that ends while we dial looks like this too.
                raise LinkRefusedError("disconnected during the handshake")
            if event in _HANDSHAKE_FAILURES:
                raise HandshakeError("handshake failed: is the wire secret the same on both sides?")
            if event == zmq.EVENT_CLOSED:
                raise LinkRefusedError("connection refused")
            if event == zmq.EVENT_DISCONNECTED:
                raise LinkRefusedError("disconnected during the handshake")

    async def watch(self) -> None:
        """Wait until the connection breaks, then raise LinkLostError."""
        while True:
            if await self._next_event() in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                raise LinkLostError("connection lost")

    async def _next_event(self) -> int:
        event = await recv_monitor_message(self._monitor)
        return int(event["event"])

    def send(self, data: bytes) -> None:
        """Send now, or keep the message until the socket takes it."""
        if self._outbox or not self._try_send(data):
            self._outbox.append(data)
            self._outbox_filled.set()

    def _try_send(self, data: bytes) -> bool:
        # With NOBLOCK the returned future is already done.
        sent = cast("asyncio.Future[None]", self._socket.send(data, flags=zmq.NOBLOCK))
        error = sent.exception()
        if error is None:
            return True
        if isinstance(error, zmq.Again):
            return False
        raise LinkLostError(f"cannot send: {error}") from error

    async def flush(self) -> None:
        """Send what waits whenever the socket has room; runs as long as the link."""
        while True:
            await self._outbox_filled.wait()
            await self._writable()
            while self._outbox and self._try_send(self._outbox[0]):
                self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()

    async def _writable(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        await poller.poll()

    async def receive(self) -> bytes:
        """Return the next frame. A frame that arrives in the moment of a cancellation is not lost, see `leftovers`."""
        self._incoming = cast("asyncio.Future[bytes]", self._socket.recv())
        data = await self._incoming
        self._incoming = None
        return data

    def leftovers(self) -> list[bytes]:
        """Return the frames that arrived before the connection broke and were not received yet."""
        frames: list[bytes] = []
        last, self._incoming = self._incoming, None
        if last is not None and last.done() and not last.cancelled() and last.exception() is None:
            frames.append(last.result())
        while True:
            try:
                frames.append(self._plain.recv(zmq.NOBLOCK))
            except zmq.ZMQError:
                return frames

    def close(self) -> None:
        """Drop the connection and everything unsent."""
        self._outbox.clear()
        self._plain.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._monitor_plain.close(linger=0)
        self._plain.close(linger=0)
