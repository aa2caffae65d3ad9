"""ZeroMQ sockets as kvferry uses them: nothing dropped silently, heartbeats on, CURVE when a secret is set.

The only module of `wire` that needs pyzmq; imported by engines and routers. Without a secret the wire stays on loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass

import zmq
from zmq.utils import z85

HEARTBEAT_MS = 2000
HIGH_WATER_MARK = 20_000
MAX_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WireKeys:
    """One CURVE key pair in z85 text, shared by every process that knows the secret."""

    public: bytes
    secret: bytes


def derive_keys(secret: bytes) -> WireKeys:
    """Derive the CURVE key pair of a wire secret by HKDF-SHA256 (RFC 5869). Raises ValueError under 16 bytes."""
    if len(secret) < 16:
        raise ValueError(f"the wire secret has {len(secret)} bytes, at least 16 are required")
    extracted = hmac.new(b"kvferry wire v1", secret, hashlib.sha256).digest()
    scalar = hmac.new(extracted, b"curve25519\x01", hashlib.sha256).digest()
    secret_z85 = z85.encode(scalar)
    return WireKeys(public=zmq.curve_public(secret_z85), secret=secret_z85)


def is_loopback(host: str) -> bool:
    """Tell whether a bind host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare(socket: zmq.Socket[bytes]) -> None:
    """Set the options that every socket of ours has; call before bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    else:
        socket.setsockopt(zmq.IMMEDIATE, 1)


def secure_server(socket: zmq.Socket[bytes], keys: WireKeys) -> None:
    """Make a bound socket accept CURVE clients only; who is admitted is decided by the ZAP handler of its context."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


def secure_client(socket: zmq.Socket[bytes], keys: WireKeys) -> None:
    """Make a connecting socket speak CURVE with the shared key pair."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
