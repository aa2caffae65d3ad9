"""Finds addresses that may be engines; whether they are, and live, is decided on the connection (`client`).

Names are resolved in a thread per name, since a resolver may block for many seconds. A failed or empty answer keeps the
last set, and an address that leaves DNS is forgotten only once it has been unconnected for a while.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

FORGET_AFTER_S = 30.0
RESOLVE_INTERVAL_S = 1.0

Resolver = Callable[[str, int], list[str]]
"""(name, port) -> "host:port" strings; raises OSError. Blocks."""


class SourceError(ValueError):
    """A discovery source cannot be read."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What `--decode` and `--prefill` name together: fixed addresses, and names to resolve again and again."""

    addresses: frozenset[str] = frozenset()
    names: frozenset[tuple[str, int]] = frozenset()

    def __or__(self, other: Sources) -> Sources:
        return Sources(self.addresses | other.addresses, self.names | other.names)


def parse_sources(text: str) -> Sources:
    """Read `static:HOST:PORT,...` or `dns:NAME:PORT`; empty text names nothing. Raises SourceError.

    A static host that is a name is resolved like `dns:`, except localhost.
    """
    if not text:
        return Sources()
    kind, _, rest = text.partition(":")
    if kind not in ("static", "dns") or not rest:
        raise SourceError(f"{text!r} is no engine source; write static:HOST:PORT,HOST:PORT or dns:NAME:PORT")
    addresses: set[str] = set()
    names: set[tuple[str, int]] = set()
    for part in rest.split(","):
        host, port = _host_and_port(part.strip(), text)
        if kind == "static" and host == "localhost":
            host = "127.0.0.1"
        if kind == "static" and _is_ip(host):
            addresses.add(join_address(host, port))
        else:
            names.add((host, port))
    return Sources(frozenset(addresses), frozenset(names))


def _host_and_port(part: str, text: str) -> tuple[str, int]:
    host, _, port = part.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SourceError(f"{part!r} in {text!r} is not HOST:PORT with a port from 1 to 65535")
    return host, int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Return host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(name: str, port: int) -> list[str]:
    """Return all addresses of a name by the system's resolver. Blocks. Raises OSError."""
    answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({join_address(str(answer[4][0]), port) for answer in answers})


@dataclass(slots=True)
class AddressBook:
    """Which addresses to keep dialling: pure bookkeeping over answers, connections and time."""

    fixed: frozenset[str]
    forget_after_s: float = FORGET_AFTER_S
    _answers: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    _unlisted_since: dict[str, float] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)

    def answered(self, name: tuple[str, int], addresses: Iterable[str]) -> None:
        """Take one answer of the resolver; an empty one changes nothing."""
        found = frozenset(addresses)
        if found:
            self._answers[name] = found

    def wanted(self, connected: frozenset[str], now: float) -> frozenset[str]:
        """Return the addresses to have a client for. `connected`: those with a completed HELLO right now."""
        listed = self.fixed.union(*self._answers.values())
        self._known |= listed
        for address in list(self._known):
            if address in listed or address in connected:
                self._unlisted_since.pop(address, None)
            elif now - self._unlisted_since.setdefault(address, now) >= self.forget_after_s:
                self._known.discard(address)
                del self._unlisted_since[address]
        return frozenset(self._known)


class NameWatcher:
    """Resolves one name every second in a thread of its own and reports each answer, until `stop`."""

    def __init__(
        self,
        name: tuple[str, int],
        report: Callable[[tuple[str, int], list[str]], None],
        *,
        resolver: Resolver = resolve,
        interval_s: float = RESOLVE_INTERVAL_S,
    ) -> None:
        self._name = name
        self._report = report
        self._resolver = resolver
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._watch, name=f"resolve-{name[0]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; a resolver that hangs is left behind (daemon thread)."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._report(self._name, self._look_up())
            self._stopping.wait(self._interval_s)

    def _look_up(self) -> list[str]:
        try:
            addresses = self._resolver(*self._name)
        except OSError as error:
            if not self._failing:
                logger.warning("name not resolved, keeping the last answer: name=%s error=%s", self._name[0], error)
            self._failing = True
            return []
        if self._failing:
            logger.info("name resolves again: name=%s num_addresses=%d", self._name[0], len(addresses))
        self._failing = False
        return addresses
