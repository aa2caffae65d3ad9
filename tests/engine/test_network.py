"""The engine's connections against hand-made peers over real sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvferry_engine.errors import ConfigError, PortInUseError
from kvferry_engine.network import Network, PeerDown, PeerUp, Received
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire import sockets

SECRET = b"0123456789abcdef0123456789abcdef"


def make_network(
    boot: str = "engine",
    *,
    secrets: list[bytes] | None = None,
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Network:
    return Network(
        hello=lambda: wire.Hello(kind=wire.PeerKind.ENGINE, boot=boot, name=boot),
        beat=lambda: wire.Beat(load=wire.Load()),
        boot=boot,
        host="127.0.0.1",
        port=port,
        secrets=secrets or [],
        clock=clock,
    )


@pytest.fixture
def network() -> Iterator[Network]:
    network = make_network()
    network.start()
    yield network
    network.close()


class Peer:
    """A router made by hand."""

    def __init__(self, port: int, boot: str = "router", secret: bytes | None = None) -> None:
        self.boot = boot
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        sockets.prepare(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, boot.encode())
        self.socket.setsockopt(zmq.SNDTIMEO, 2000)
        if secret is not None:
            sockets.secure_client(self.socket, sockets.derive_keys(secret))
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: wire.Body, *, dst: str = "engine", src: str = "") -> None:
        self.socket.send(wire.encode(wire.Envelope(src or self.boot, dst, 1, message)))

    def hello(self) -> None:
        self.send(wire.Hello(kind=wire.PeerKind.ROUTER, boot=self.boot, name="r"), dst="")

    def receive(self, kind: type[wire.Message], timeout_ms: int = 3000) -> Any:
        """The next message of a kind; others are skipped. None when there is none in time."""
        while self.socket.poll(timeout_ms):
            body = wire.decode(self.socket.recv()).body
            if isinstance(body, kind):
                return body
        return None

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer(network: Network) -> Iterator[Peer]:
    peer = Peer(network.port)
    yield peer
    peer.close()


def next_item(network: Network, kind: type) -> Any:
    while True:
        item = network.inbox.get(timeout=3)
        if isinstance(item, kind):
            return item


def test_hello_is_answered_and_beats_follow(network: Network, peer: Peer) -> None:
    peer.hello()

    assert peer.receive(wire.Hello).boot == "engine"
    assert next_item(network, PeerUp).boot == "router"
    assert peer.receive(wire.Beat).load is not None


def test_messages_before_hello_or_for_another_boot_are_dropped(network: Network, peer: Peer) -> None:
    peer.send(wire.Abort(rid="too early"))
    peer.hello()
    next_item(network, PeerUp)
    peer.send(wire.Abort(rid="other life"), dst="earlier-boot")
    peer.send(wire.Abort(rid="stranger"), src="somebody")
    peer.send(wire.Abort(rid="good"))

    assert next_item(network, Received).message.rid == "good"


@pytest.mark.parametrize("boot", ["", "somebody else"])
def test_a_hello_under_a_false_name_is_dropped(network: Network, peer: Peer, boot: str) -> None:
    peer.send(wire.Hello(kind=wire.PeerKind.ROUTER, boot=boot, name="r"), dst="")
    peer.hello()

    assert next_item(network, PeerUp).boot == "router"
    assert network.inbox.empty()


def test_closing_twice_and_sending_after_it_do_no_harm() -> None:
    network = make_network()
    network.start()
    network.close()
    network.close()
    network.send("anybody", wire.Bye())


def test_garbage_does_not_disturb(network: Network, peer: Peer) -> None:
    peer.socket.send(b"\xc1garbage")
    peer.socket.send_multipart([b"a", b"b", b"c"])
    peer.hello()

    assert next_item(network, PeerUp).boot == "router"


def test_bye_takes_the_peer_down(network: Network, peer: Peer) -> None:
    peer.hello()
    next_item(network, PeerUp)
    peer.send(wire.Bye())

    assert next_item(network, PeerDown).boot == "router"


def test_a_silent_peer_is_dead_after_a_while() -> None:
    network = make_network(clock=lambda: time.monotonic() * 8)
    network.start()
    peer = Peer(network.port)
    peer.hello()
    next_item(network, PeerUp)

    down = next_item(network, PeerDown)

    assert down.boot == "router"
    assert "silent" in down.reason
    peer.close()
    network.close()


def test_a_process_that_stood_still_does_not_blame_its_peers() -> None:
    offset = [0.0]
    network = make_network(clock=lambda: time.monotonic() + offset[0])
    network.start()
    peer = Peer(network.port)
    peer.hello()
    next_item(network, PeerUp)
    offset[0] = 10 * wire.DEAD_AFTER_S
    peer.send(wire.Abort(rid="still here"))

    assert network.inbox.get(timeout=3) == Received("router", wire.Abort(rid="still here"))
    peer.close()
    network.close()


def test_engines_dial_each_other_and_notice_a_closed_connection_at_once(network: Network) -> None:
    other = make_network("other")
    other.start()
    network.connect(f"127.0.0.1:{other.port}")

    assert next_item(network, PeerUp).boot == "other"
    assert next_item(other, PeerUp).boot == "engine"
    network.send("other", wire.Close(tid="t"))
    assert next_item(other, Received).message.tid == "t"
    other.send("engine", wire.AbortAck(tid="u"))
    assert next_item(network, Received).message.tid == "u"
    other.close()
    assert next_item(network, PeerDown).boot == "other"


def test_a_restarted_engine_on_the_same_port_is_a_new_peer(network: Network) -> None:
    first = make_network("first")
    port = first.port
    first.start()
    network.connect(f"127.0.0.1:{port}")
    assert next_item(network, PeerUp).boot == "first"
    first.close()
    assert next_item(network, PeerDown).boot == "first"
    second = make_network("second", port=port)
    second.start()

    assert next_item(network, PeerUp).boot == "second"
    second.close()


@pytest.mark.parametrize(
    ("secret", "is_admitted"), [(SECRET, True), (b"another secret of good length", False), (None, False)]
)
def test_only_the_secret_opens_the_wire(secret: bytes | None, is_admitted: bool) -> None:
    network = make_network(secrets=[SECRET])
    network.start()
    peer = Peer(network.port, secret=secret)
    peer.socket.setsockopt(zmq.SNDTIMEO, 1500)
    with contextlib.suppress(zmq.Again):
        peer.hello()

    assert (peer.receive(wire.Hello, 1500) is not None) is is_admitted
    peer.close()
    network.close()


def test_a_secret_can_be_rotated() -> None:
    old, new = b"old secret, long enough", b"new secret, long enough"
    upgraded = make_network("upgraded", secrets=[new, old])
    upgraded.start()
    waiting = make_network("waiting", secrets=[old])
    waiting.start()

    upgraded.connect(f"127.0.0.1:{waiting.port}")

    assert next_item(upgraded, PeerUp).boot == "waiting"
    upgraded.close()
    waiting.close()


def test_the_wire_does_not_open_to_the_network_without_a_secret() -> None:
    with pytest.raises(ConfigError, match="wire-secret-file"):
        Network(hello=lambda: wire.Hello(kind=wire.PeerKind.ENGINE, boot="b", name="n"), beat=wire.Beat, boot="b", host="0.0.0.0",
                port=0, secrets=[])  # fmt: skip


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUseError, match=str(taken.getsockname()[1])):
            make_network(port=taken.getsockname()[1])
