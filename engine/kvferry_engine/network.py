"""The engine's only place with ZeroMQ sockets: one thread that owns them, speaks HELLO and BEAT, and feeds the core's inbox.

The thread exists so that a long forward pass never delays a heartbeat; it only wakes for messages, twice a second for beats.
The core reads `inbox` and calls `send` and `connect`; `control` continues the story.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry_engine.errors import ConfigError, PortInUseError
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire import sockets

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
POLL_MS = 100
SAID_BYE = "said bye"
"""Reason of a PeerDown that was on purpose."""
FORGET_DIALLED_S = 60.0
REBIND_S = 2.0
MAX_DIALLED = 256
STALL_S = 1.0
"""A turn of the network thread takes at most POLL_MS; one this long means that the process itself stood still."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer said HELLO (again, after a reconnect). `address` is what was dialled, empty for an incoming connection."""

    boot: str
    hello: wire.Hello
    address: str


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The last route to a peer is gone, or it was silent for `DEAD_AFTER_S`, or it said BYE."""

    boot: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    boot: str
    message: wire.Body


@dataclass(frozen=True, slots=True)
class Wake:
    """Something else than the network has work for the core (a transfer completion, a signal)."""


InboxItem = PeerUp | PeerDown | Received | Wake


@dataclass(eq=False, slots=True, kw_only=True)
class _Route:
    """One way to reach a process: a DEALER of ours (`address`), or an identity on our ROUTER."""

    address: str = ""
    identity: bytes = b""
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes] | None = None
    boot: str = ""
    sent: int = 0
    pending: deque[bytes] = field(default_factory=deque)
    last_heard_s: float = 0.0
    is_connected: bool = False
    key_index: int = 0


class Network:
    """Connections of one engine. Public methods may be called from any thread."""

    def __init__(
        self,
        *,
        hello: Callable[[], wire.Hello],
        beat: Callable[[], wire.Beat],
        boot: str,
        host: str,
        port: int,
        secrets: list[bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make sure of the port, without listening yet.

        Raises ConfigError for a non-loopback host without a secret, PortInUseError when the port is taken.
        """
        if not secrets and not sockets.is_loopback(host):
            raise ConfigError(
                f"--host {host} would open the wire to the network without a secret; "
                "give --wire-secret-file, or bind to 127.0.0.1"
            )
        self._hello = hello
        self._beat = beat
        self._boot = boot
        self._clock = clock
        self._keys = [sockets.derive_keys(secret) for secret in secrets]
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self._outbox: deque[tuple[str, wire.Body]] = deque()
        self._dials: deque[str] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_stopping = False
        self._is_closed = False
        self._flush_deadline_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = self._open_zap() if self._keys else None
        self._server: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        sockets.prepare(self._server)
        if self._keys:
            sockets.secure_server(self._server, self._keys[0])
        self._host = host
        self._server.setsockopt(zmq.IPV6, int(":" in host))
        self.port = self._bind(port)
        # Peers that dial while the model loads shall be refused, not kept waiting in a queue with half a conversation.
        self._server.unbind(self._endpoint())
        self._by_identity: dict[bytes, _Route] = {}
        self._by_address: dict[str, _Route] = {}
        self._by_boot: dict[str, list[_Route]] = {}
        self._dialled_s: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        zap.bind(ZAP_ENDPOINT)
        return zap

    def _bind(self, port: int) -> int:
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self._server.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} on {self._host} is in use; stop what listens there or choose another --port"
                ) from error
            raise ConfigError(f"cannot bind the wire to {self._host}:{port}: {error.strerror}") from error
        return int(self._endpoint().rsplit(":", 1)[1])

    def _endpoint(self) -> str:
        endpoint = self._server.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def start(self) -> None:
        """Begin to answer peers. Raises PortInUseError when somebody took the port meanwhile."""
        deadline_s = self._clock() + REBIND_S
        while True:
            try:
                self._bind(self.port)
            except PortInUseError:
                # libzmq closes the listener of the first bind on a thread of its own.
                if self._clock() > deadline_s:
                    raise
                time.sleep(0.005)
            else:
                break
        self._thread.start()

    def send(self, boot: str, message: wire.Body) -> None:
        """Queue a message for a peer; messages for a peer that is gone are dropped (its PeerDown is in the inbox)."""
        self._outbox.append((boot, message))
        self.wake_thread()

    def connect(self, address: str) -> None:
        """Dial host:port unless that is done already; PeerUp follows when it answers."""
        self._dials.append(address)
        self.wake_thread()

    def wake_core(self) -> None:
        """Make a blocked core turn once."""
        self.inbox.put(Wake())

    def wake_thread(self) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"x")

    def close(self, *, flush_s: float = 1.0) -> None:
        """Send what is queued for at most `flush_s`, say BYE, and close every socket. Blocks; idempotent."""
        if self._is_stopping:
            return
        if not self._thread.is_alive():
            self._is_stopping = True
            self._close_sockets()
            return
        self._flush_deadline_s = self._clock() + flush_s
        self._is_stopping = True
        self.wake_thread()
        self._thread.join(flush_s + 5.0)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._server, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        self._poller = poller
        next_beat_s = 0.0
        now = self._clock()
        try:
            while True:
                events = dict(poller.poll(POLL_MS))
                now, before = self._clock(), now
                if now - before > STALL_S:
                    self._forgive(now - before)
                if self._wake_read in events:
                    self._drain_pipe()
                if self._zap is not None and self._zap in events:
                    self._answer_zap(self._zap)
                if self._server in events:
                    self._receive_server(now)
                for route in list(self._by_address.values()):
                    if route.monitor is not None and route.monitor in events:
                        self._read_monitor(route, now)
                    if route.socket in events:
                        self._receive_dealer(route, now)
                while self._dials:
                    self._dial(self._dials.popleft(), now)
                if now >= next_beat_s:
                    next_beat_s = now + wire.BEAT_INTERVAL_S
                    self._send_beats()
                    self._drop_silent(now)
                self._flush_outbox()
                if self._is_stopping and (now >= self._flush_deadline_s or self._is_flushed()):
                    break
        except Exception:
            log.exception("network thread failed")
            self.inbox.put(PeerDown("", "network thread failed"))
        finally:
            self._say_bye()
            self._close_sockets()

    def _forgive(self, stalled_s: float) -> None:
        """This process stood still (stopped, swapped out): what peers said meanwhile is still on its way."""
        for routes in self._by_boot.values():
            for route in routes:
                route.last_heard_s += stalled_s

    def _drain_pipe(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _is_flushed(self) -> bool:
        return not self._outbox and not any(route.pending for routes in self._by_boot.values() for route in routes)

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        frames = zap.recv_multipart()
        version, request_id, mechanism = frames[0], frames[1], frames[5]
        client_key = z85.encode(frames[6]) if mechanism == b"CURVE" and len(frames) > 6 else b""
        is_admitted = any(client_key == key.public for key in self._keys)
        status = (b"200", b"OK") if is_admitted else (b"400", b"unknown key")
        zap.send_multipart([version, request_id, *status, b"", b""])

    def _receive_server(self, now: float) -> None:
        for _ in range(1000):
            try:
                frames = self._server.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                log.warning("dropped malformed message frames=%d", len(frames))
                continue
            identity, data = frames
            route = self._by_identity.get(identity)
            if route is None:
                route = _Route(identity=identity, socket=self._server, is_connected=True)
            self._handle_frame(route, data, now)

    def _receive_dealer(self, route: _Route, now: float) -> None:
        for _ in range(1000):
            try:
                data = route.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle_frame(route, data, now)

    def _handle_frame(self, route: _Route, data: bytes, now: float) -> None:
        try:
            envelope = wire.decode(data)
        except msgspec.DecodeError as error:
            log.warning("dropped unreadable message peer=%s error=%s", route.boot or route.address, error)
            return
        if envelope.dst not in ("", self._boot):
            return  # meant for an earlier process on this port
        body = envelope.body
        route.last_heard_s = now
        if isinstance(body, wire.Hello):
            if not body.boot or body.boot != envelope.src:
                log.warning("dropped HELLO with boot=%r from %r", body.boot, envelope.src)
                return
            self._greet(route, body)
            return
        if route.boot != envelope.src:
            return  # not introduced yet, or a late message of an earlier boot
        if isinstance(body, wire.Bye):
            self._remove(route, SAID_BYE)
            return
        if isinstance(body, wire.Beat):
            return  # it was heard, that is all
        self.inbox.put(Received(route.boot, body))

    def _greet(self, route: _Route, hello: wire.Hello) -> None:
        ours = self._hello()
        is_versioned = hello.version_min <= ours.version_max and ours.version_min <= hello.version_max
        is_same_service = not hello.service or not ours.service or hello.service == ours.service
        if route.boot and route.boot != hello.boot:
            self._remove(route, "restarted")
        if not route.address:
            self._by_identity[route.identity] = route
        route.boot = hello.boot
        if not is_versioned or not is_same_service:
            if not route.address:
                self._enqueue(route, ours)
            log.warning("refused peer name=%s boot=%s versions=%d..%d service=%r", hello.name, hello.boot,
                        hello.version_min, hello.version_max, hello.service)  # fmt: skip
            self._remove(route, "incompatible")
            return
        routes = self._by_boot.setdefault(hello.boot, [])
        if route not in routes:
            routes.append(route)
        self.inbox.put(PeerUp(hello.boot, hello, route.address))
        if not route.address:
            self._enqueue(route, ours)

    def _dial(self, address: str, now: float) -> None:
        self._dialled_s[address] = now
        if address in self._by_address:
            return
        if len(self._by_address) >= MAX_DIALLED:
            log.warning("not dialled, too many connections address=%s", address)
            return
        self._open_dealer(address, key_index=0, now=now)

    def _open_dealer(self, address: str, *, key_index: int, now: float) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        sockets.prepare(socket)
        socket.setsockopt(zmq.IDENTITY, self._boot.encode())
        socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
        if self._keys:
            sockets.secure_client(socket, self._keys[key_index % len(self._keys)])
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket()
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            log.warning("cannot dial address=%s error=%s", address, error)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
            return
        self._by_address[address] = _Route(
            address=address, socket=socket, monitor=monitor, last_heard_s=now, key_index=key_index
        )
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _read_monitor(self, route: _Route, now: float) -> None:
        assert route.monitor is not None
        while True:
            try:
                event = recv_monitor_message(route.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                route.is_connected = True
                route.last_heard_s = now
                route.pending.clear()
                self._enqueue(route, self._hello(), dst="")
            elif event["event"] != zmq.EVENT_DISCONNECTED:
                continue
            elif route.is_connected:
                route.is_connected = False
                self._remove(route, "connection closed")
            elif (
                len(self._keys) > 1
            ):  # refused before the handshake was through: perhaps the peer still has the other secret
                self._close_route(route)
                self._open_dealer(route.address, key_index=route.key_index + 1, now=now)
                return

    def _enqueue(self, route: _Route, message: wire.Body, *, dst: str | None = None) -> None:
        route.sent += 1
        envelope = wire.Envelope(self._boot, route.boot if dst is None else dst, route.sent, message)
        route.pending.append(wire.encode(envelope))
        self._flush(route)

    def _flush(self, route: _Route) -> None:
        while route.pending:
            try:
                if route.address:
                    route.socket.send(route.pending[0], zmq.NOBLOCK)
                else:
                    route.socket.send_multipart([route.identity, route.pending[0]], zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    self._remove(route, "unreachable")
                    return
                raise
            route.pending.popleft()

    def _flush_outbox(self) -> None:
        while self._outbox:
            boot, message = self._outbox.popleft()
            routes = self._by_boot.get(boot)
            if routes:
                # A peer that reconnects leaves a dying route behind for a moment.
                self._enqueue(max(reversed(routes), key=lambda route: route.last_heard_s), message)
        for routes in list(self._by_boot.values()):
            for route in list(routes):
                if route.pending:
                    self._flush(route)

    def _send_beats(self) -> None:
        beat = self._beat()
        for routes in list(self._by_boot.values()):
            for route in list(routes):
                if len(route.pending) < 4:
                    self._enqueue(route, beat)

    def _drop_silent(self, now: float) -> None:
        for routes in list(self._by_boot.values()):
            for route in list(routes):
                if now - route.last_heard_s > wire.DEAD_AFTER_S:
                    self._remove(route, f"silent for {now - route.last_heard_s:.0f} s")
                    if route.address:
                        self._close_route(route)
        for address, route in list(self._by_address.items()):
            if not route.is_connected and now - self._dialled_s.get(address, now) > FORGET_DIALLED_S:
                self._close_route(route)
                self._dialled_s.pop(address, None)

    def _remove(self, route: _Route, reason: str) -> None:
        """Forget who is behind a route; the last route of a peer takes the peer down."""
        boot, route.boot = route.boot, ""
        route.pending.clear()
        self._by_identity.pop(route.identity, None)
        routes = self._by_boot.get(boot)
        if not routes or route not in routes:
            return
        routes.remove(route)
        if not routes:
            del self._by_boot[boot]
            self.inbox.put(PeerDown(boot, reason))

    def _close_route(self, route: _Route) -> None:
        self._remove(route, "closed")
        self._by_address.pop(route.address, None)
        self._poller.unregister(route.socket)
        route.socket.disable_monitor()
        if route.monitor is not None:
            self._poller.unregister(route.monitor)
            route.monitor.close(linger=0)
        route.socket.close()

    def _say_bye(self) -> None:
        for routes in list(self._by_boot.values()):
            for route in list(routes):
                self._enqueue(route, wire.Bye())

    def _close_sockets(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for route in self._by_address.values():
            route.socket.disable_monitor()
            if route.monitor is not None:
                route.monitor.close(linger=0)
            route.socket.close(linger=200)
        self._server.close(linger=200)
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
