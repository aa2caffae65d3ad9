"""Executes rank 0's transfer commands on one rank: pairs, staging slots and copies to and from this rank's part of the cache.

Runs on every rank, in-process on rank 0. `execute` and `drain` are called from the rank's main thread, between model steps and in
the order rank 0 issued commands; transport threads only queue and call `wake`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from kvferry_engine.transfer import staging
from kvferry_engine.transfer.commands import (
    AnyCommand,
    AnyEvent,
    CancelSend,
    ClosePair,
    Launch,
    OpenPair,
    PairBroken,
    PairId,
    PairOpened,
    PayloadReceived,
    PayloadSent,
    PostReceive,
    ReceivePosted,
    Scatter,
    Scattered,
    Send,
)
from kvferry_engine.transfer.protocol.actions import Outcome
from kvferry_engine.transfer.transport.base import Connector, Posted, Transport, TransportEvent

_Item = tuple[PairId, bool, TransportEvent | Transport | str]


class RankWorker:
    """Staging slots and pairs of one rank. `connectors` by transport name; "gloo" or another host one must be among them."""

    def __init__(
        self,
        *,
        storage: Tensor,
        num_receive_slots: int,
        num_send_slots: int,
        slot_bytes: int,
        connectors: Mapping[str, Connector],
        wake: Callable[[], None],
    ) -> None:
        self._connectors = connectors
        self._wake = wake
        self._cache = staging.CacheAccess(storage, slot_bytes)
        self._receive_pools: dict[str, staging.StagingPool] = {}
        self._send_pools: dict[str, staging.StagingPool] = {}
        for device_type in {connector.device_type for connector in connectors.values()}:
            device = storage.device if device_type == storage.device.type else torch.device(device_type)
            is_pinned = device.type == "cpu" and storage.is_cuda
            for pools, num_slots in ((self._receive_pools, num_receive_slots), (self._send_pools, num_send_slots)):
                pools[device_type] = staging.StagingPool(
                    num_slots=num_slots, slot_bytes=slot_bytes, device=device, is_pinned=is_pinned
                )
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._events: list[AnyEvent] = []
        self._opening: dict[PairId, str] = {}
        self._open: dict[PairId, tuple[Transport, str]] = {}

    def execute(self, command: AnyCommand) -> None:
        """Carry out one command; results come from `drain`."""
        match command:
            case OpenPair():
                self._open_pair(command)
            case ClosePair(pair):
                self._close_pair(pair)
            case PostReceive():
                self._post_receive(command)
            case Scatter():
                self._scatter(command)
            case Send():
                self._send(command)
            case Launch(pair, pair_seq):
                if pair in self._open:
                    self._open[pair][0].launch(pair_seq)
            case CancelSend(pair, pair_seq):
                if pair in self._open:
                    self._open[pair][0].cancel(pair_seq)

    def drain(self) -> list[AnyEvent]:
        """Everything that happened since the last call."""
        while True:
            try:
                pair, is_sender, item = self._items.get_nowait()
            except queue.Empty:
                break
            self._take(pair, is_sender, item)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all pairs."""
        self._opening.clear()
        for pair in list(self._open):
            self._close_pair(pair)
        for connector in self._connectors.values():
            connector.close()

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _open_pair(self, command: OpenPair) -> None:
        connector = self._connectors.get(command.transport)
        if connector is None:
            self._events.append(PairBroken(command.pair, f"no transport {command.transport!r} on this rank"))
            return
        self._opening[command.pair] = connector.device_type
        put = partial(self._put, command.pair, command.is_sender)
        connector.open(
            prefix=command.pair.prefix,
            is_sender=command.is_sender,
            store_address=command.store_address,
            sink=put,
            on_open=put,
            on_error=put,
        )

    def _close_pair(self, pair: PairId) -> None:
        self._opening.pop(pair, None)
        if pair in self._open:
            transport, _ = self._open.pop(pair)
            transport.close()

    def _put(self, pair: PairId, is_sender: bool, item: TransportEvent | Transport | str) -> None:
        self._items.put((pair, is_sender, item))
        self._wake()

    def _take(self, pair: PairId, is_sender: bool, item: TransportEvent | Transport | str) -> None:
        if isinstance(item, str):
            if self._opening.pop(pair, None) is not None:
                self._events.append(PairBroken(pair, item))
        elif isinstance(item, Posted):
            self._events.append(ReceivePosted(pair, item.pair_seq))
        elif isinstance(item, TransportEvent):
            self._complete(pair, is_sender, item.pair_seq, item.error)
        elif pair in self._opening:
            self._open[pair] = (item, self._opening.pop(pair))
            self._events.append(PairOpened(pair))
        else:
            item.close()

    def _complete(self, pair: PairId, is_sender: bool, pair_seq: int, error: str) -> None:
        is_ok = not error
        self._events.append(PayloadSent(pair, pair_seq, is_ok) if is_sender else PayloadReceived(pair, pair_seq, is_ok))
        if error and pair in self._open:
            self._events.append(PairBroken(pair, error))

    # --- payloads ---------------------------------------------------------------------------------------------------

    def _post_receive(self, command: PostReceive) -> None:
        if command.pair not in self._open:
            self._events.append(PayloadReceived(command.pair, command.pair_seq, False))
            return
        transport, device_type = self._open[command.pair]
        view = self._receive_pools[device_type].view(command.slot, command.num_bytes)
        self._cache.clear(view)
        transport.post_recv(command.pair_seq, view)

    def _scatter(self, command: Scatter) -> None:
        if command.pair not in self._open:
            self._events.append(Scattered(command.pair, command.pair_seq, Outcome.FAILED))
            return
        _, device_type = self._open[command.pair]
        view = self._receive_pools[device_type].view(command.slot, command.num_bytes)
        outcome = self._cache.unpack(
            view,
            _block_ids(command.blocks),
            layers=(command.layer_start, command.layer_stop),
            heads=(command.head_start, command.head_stop),
            mark=command.mark,
            pair_seq=command.pair_seq,
        )
        self._events.append(Scattered(command.pair, command.pair_seq, outcome))

    def _send(self, command: Send) -> None:
        if command.pair not in self._open:
            self._events.append(PayloadSent(command.pair, command.pair_seq, False))
            return
        transport, device_type = self._open[command.pair]
        view = self._send_pools[device_type].view(command.slot, command.num_bytes)
        self._cache.pack(
            view,
            _block_ids(command.blocks),
            layers=(command.layer_start, command.layer_stop),
            heads=(command.head_start, command.head_stop),
            mark=command.mark,
            pair_seq=command.pair_seq,
        )
        transport.send(command.pair_seq, view)


def _block_ids(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.int32)
