"""What this machine offers to a service that runs on it: cores and free ports."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
from pathlib import Path

from kvferry_operator.errors import PortError

_PORT_RANGE = range(20_000, 32_000)
"""Below the kernel's usual ephemeral ports (32768 and up), so that no outgoing connection takes a port while its owner
restarts."""
_LEGAL_PORTS = range(1, 65_536)
_MOST_TRIES = 2_000


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores this process may use: its affinity, cut by the cgroup's quota (rounded up); at least 1."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = cpu_max.read_text(encoding="ascii").split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def check_port(host: str, port: int) -> None:
    """Raise PortError when nobody can listen on `port` of `host` now."""
    if port not in _LEGAL_PORTS:
        raise PortError(f"port {port} does not exist; choose one of 1 to 65535")
    try:
        _bind(host, port).close()
    except OSError as error:
        raise PortError(f"port {port} of {host} cannot be used ({error.strerror}); choose another one") from error


def free_ports(count: int, host: str, *, taken: frozenset[int] = frozenset(), draw: random.Random) -> list[int]:
    """Return `count` different ports of `host` that are free now, none of them in `taken`. Raises PortError."""
    held: dict[int, socket.socket] = {}
    try:
        for _ in range(_MOST_TRIES):
            if len(held) == count:
                break
            port = draw.choice(_PORT_RANGE)
            if port in taken or port in held:
                continue
            with contextlib.suppress(OSError):
                held[port] = _bind(host, port)
        if len(held) < count:
            raise PortError(f"found only {len(held)} of {count} free ports on {host}")
        return list(held)
    finally:
        for listener in held.values():
            listener.close()


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
