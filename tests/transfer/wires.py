"""What carries payloads in the simulation, and what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch

from kvferry_engine.transfer import pairs
from kvferry_engine.transfer.staging import TOMBSTONE_BYTES
from kvferry_engine.transfer.transport.base import Completion, Connector, Sink, Transport
from kvferry_engine.transfer.transport.gloo import GlooConnector
from kvferry_engine.transfer.transport.local import LocalConnector, LocalHub


class LocalWires:
    """Payloads move inside the process."""

    transports = ("local",)

    def __init__(self, *, is_manual: bool = False) -> None:
        self.hub = LocalHub(is_manual=is_manual)

    def connectors(self, boot: str) -> dict[str, Connector]:
        return {"local": LocalConnector(self.hub)}

    def store_address(self, boot: str) -> str:
        return boot

    def close(self) -> None:
        return


class GlooWires:
    """Payloads move over gloo pairs on the loopback interface."""

    transports = ("gloo",)

    def __init__(self) -> None:
        self._stores = pairs.Stores()
        self._addresses: dict[str, str] = {}

    def store_address(self, boot: str) -> str:
        if boot not in self._addresses:
            store, port = pairs.host_store("127.0.0.1", 0)
            self._addresses[boot] = f"127.0.0.1:{port}"
            self._stores.add_own(self._addresses[boot], store)
        return self._addresses[boot]

    def connectors(self, boot: str) -> dict[str, Connector]:
        return {"gloo": GlooConnector(self._stores, host="127.0.0.1")}

    def close(self) -> None:
        return


Wires = LocalWires | GlooWires


class Fault(StrEnum):
    CORRUPT = "corrupt"
    """One bit of the payload changes on the way."""
    TOMBSTONE = "tombstone"
    """The sender takes the payload back."""
    DROP = "drop"
    """The payload never leaves; closing the pair ends it."""


class FaultyTransport:
    """A transport whose sends go wrong as told."""

    def __init__(self, inner: Transport, sink: Sink, faults: dict[int, Fault]) -> None:
        self._inner = inner
        self._sink = sink
        self._faults = faults
        self._held: list[int] = []
        self.needs_launch = inner.needs_launch

    def post_recv(self, pair_seq: int, view: torch.Tensor) -> None:
        self._inner.post_recv(pair_seq, view)

    def send(self, pair_seq: int, view: torch.Tensor) -> None:
        match self._faults.pop(pair_seq, None):
            case Fault.DROP:
                self._held.append(pair_seq)
                return
            case Fault.TOMBSTONE:
                view = view[:TOMBSTONE_BYTES]
            case Fault.CORRUPT:
                view[3] ^= 4
        self._inner.send(pair_seq, view)

    def launch(self, pair_seq: int) -> None:
        self._inner.launch(pair_seq)

    def cancel(self, pair_seq: int) -> None:
        self._inner.cancel(pair_seq)

    def close(self) -> None:
        for pair_seq in self._held:
            self._sink(Completion(pair_seq, "never sent"))
        self._inner.close()


class FaultyConnector:
    """Wraps the transports another connector opens."""

    def __init__(self, inner: Connector, faults: dict[int, Fault]) -> None:
        self._inner = inner
        self._faults = faults
        self.device_type = inner.device_type

    def open(
        self,
        *,
        prefix: str,
        is_sender: bool,
        store_address: str,
        sink: Sink,
        on_open: Callable[[Transport], None],
        on_error: Callable[[str], None],
    ) -> None:
        def wrapped(transport: Transport) -> None:
            on_open(FaultyTransport(transport, sink, self._faults))

        self._inner.open(
            prefix=prefix,
            is_sender=is_sender,
            store_address=store_address,
            sink=sink,
            on_open=wrapped,
            on_error=on_error,
        )

    def close(self) -> None:
        self._inner.close()
