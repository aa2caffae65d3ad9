"""Builds process groups of two ranks from two engines, without a global group, over the receiver's TCPStore.

Every engine hosts one store (`host_store`, listening only where it is told to) and reaches others' as a client. A group's
keys carry both boots, both ranks and the epoch (`PairId.prefix`), so nothing old can be met; they are deleted when both ends
are open.
All functions that wait for a peer are called from daemon threads.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from kvferry_engine.errors import ConfigError, PortInUseError

__all__ = [
    "HashStore",
    "PairGroup",
    "PrefixStore",
    "Store",
    "Stores",
    "TCPStore",
    "Work",
    "delete_join_keys",
    "host_store",
    "in_daemon_thread",
    "open_gloo_group",
    "split_address",
]  # fmt: skip

PAIR_TIMEOUT = timedelta(seconds=300)
"""Limit of construction, and of any single operation on a gloo group (a plain `wait()` ends with it, too)."""
STORE_TIMEOUT = timedelta(seconds=30)
SENDER_RANK, RECEIVER_RANK = 0, 1


class Work(Protocol):
    """The handle of one posted operation."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class PairGroup(Protocol):
    """What is used of a process group; torch's stubs do not know these of the bare backends."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


def host_store(host: str, port: int) -> tuple[TCPStore, int]:
    """Serve a TCPStore on host:port (0 = any free port) and return it with its port.

    The socket is bound here because a store that binds by itself listens on every interface. Raises PortInUseError when
    the port is taken, ConfigError when the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == 98:
            raise PortInUseError(f"store port {port} on {host} is in use; choose another --store-port") from error
        raise ConfigError(f"cannot serve the pair store on {host}:{port}: {error.strerror}") from error
    bound_port = listener.getsockname()[1]
    store = TCPStore(
        host,
        bound_port,
        None,
        True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, bound_port


def split_address(address: str) -> tuple[str, int]:
    """host:port or [host]:port as a pair. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"a store address is host:port, this is {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Stores:
    """Store connections of one rank process, borrowed by one daemon thread at a time and used again.

    A store answers one call at a time per connection, and a blocked call blocks its connection: hence one for each use. They
    are kept because torch looks up the peer's name for every new connection, and a slow resolver makes that take seconds
    (measured: 5 s on one of 50 connections, torch 2.15).
    """

    def __init__(self) -> None:
        self._own: dict[str, Store] = {}
        self._idle: dict[str, list[Store]] = {}
        self._lock = threading.Lock()

    def add_own(self, address: str, store: TCPStore) -> None:
        """Know the store this process hosts."""
        self._own[address] = store

    @contextmanager
    def borrow(self, address: str) -> Iterator[Store]:
        """A connection to the store at host:port; used again unless the body fails.

        Blocks on the network. Raises RuntimeError or ValueError on failure.
        """
        store = self._take_idle(address)
        if store is None:
            store = self._open(address)
        yield store
        with self._lock:
            self._idle.setdefault(address, []).append(store)

    def _take_idle(self, address: str) -> Store | None:
        """An idle connection that still answers; the engine behind the address may have restarted."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                store = idle.pop()
            try:
                store.check(["kvferry"])
            except RuntimeError:
                continue
            return store

    def _open(self, address: str) -> Store:
        own = self._own.get(address)
        if own is not None:
            return own.clone()
        host, port = split_address(address)
        return TCPStore(host, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def delete_join_keys(store: Store, prefix: str) -> None:
    """Remove a pair's keys once both ends have come through; the second caller does it."""
    if store.add(f"{prefix}/open", 1) < 2:
        return
    for key in store.list_keys():
        if key.startswith(f"{prefix}/"):
            store.delete_key(key)


def open_gloo_group(store: Store, prefix: str, *, is_sender: bool, device: ProcessGroupGloo.Device) -> PairGroup:
    """Construct this end of a gloo pair over a store connection of the caller's own. Blocks until the peer does the same.

    Raises RuntimeError when it does not within `PAIR_TIMEOUT`.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs know another class
    options._devices = [device]
    options._timeout = PAIR_TIMEOUT
    options._threads = 1
    rank = SENDER_RANK if is_sender else RECEIVER_RANK
    group = cast(PairGroup, ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options))
    delete_join_keys(store, prefix)
    return group


def in_daemon_thread(name: str, work: Callable[[], None]) -> None:
    """Run blocking work beside the main thread; it dies with the process."""
    threading.Thread(target=work, name=name, daemon=True).start()
