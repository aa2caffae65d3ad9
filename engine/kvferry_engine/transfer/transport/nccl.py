"""Payloads over an NCCL pair of two GPUs: own thread and stream, sends launched only after the peer posted its receive.

NCCL has no tags and cannot shorten a payload, so order is everything and a cancelled payload simply travels. Written against the
rules of two-sided NCCL (one order per communicator, nothing launched that must wait for its peer); `probe` says at start
whether it can be used here, otherwise host staging over gloo serves.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist

from kvferry_engine.transfer import pairs
from kvferry_engine.transfer.transport.base import Completion, Posted, Sink, Transport

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""torch's defaults end the process when a peer dies; both are read when a group is constructed."""
MAX_CTAS = 4
"""Thread blocks a transfer may take from the model, per communicator."""


def probe(device: torch.device, tensor_parallel: int) -> str:
    """Say why NCCL cannot carry KV here; empty when it can. Builds a group of one, which loads the library and the device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if not dist.is_nccl_available():
        return "torch was built without NCCL"
    if tensor_parallel > 1:
        return "tensor parallel ranks already use NCCL from another thread"
    try:
        group = _construct(pairs.HashStore(), rank=0, size=1, device=device)
        group.abort()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _construct(store: pairs.Store, *, rank: int, size: int, device: torch.device) -> pairs.PairGroup:
    os.environ.update(ENVIRONMENT)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = pairs.PAIR_TIMEOUT
    options.config.max_ctas = MAX_CTAS
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return cast(pairs.PairGroup, group)


class NcclTransport:
    """One end of an NCCL pair. The thread launches one payload after the other and waits for each on the device."""

    needs_launch = True

    def __init__(self, group: pairs.PairGroup, *, is_sender: bool, device: torch.device, sink: Sink, name: str) -> None:
        self._group = group
        self._is_sender = is_sender
        self._device = device
        self._sink = sink
        self._is_closed = False
        self._unlaunched: dict[int, Tensor] = {}
        self._queue: queue.SimpleQueue[tuple[int, Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-nccl {name}", daemon=True)
        self._thread.start()

    def post_recv(self, pair_seq: int, view: Tensor) -> None:
        self._put(pair_seq, view)

    def send(self, pair_seq: int, view: Tensor) -> None:
        self._unlaunched[pair_seq] = view

    def launch(self, pair_seq: int) -> None:
        view = self._unlaunched.pop(pair_seq, None)
        if view is not None:
            self._put(pair_seq, view)

    def cancel(self, pair_seq: int) -> None:
        return

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for pair_seq in self._unlaunched:
            self._sink(Completion(pair_seq, "the pair is closed"))
        self._unlaunched.clear()
        # abort can itself hang (pytorch issues 119215, 150690): never on the main thread.
        pairs.in_daemon_thread("kv-nccl abort", self._group.abort)
        self._queue.put(None)

    def _put(self, pair_seq: int, view: Tensor) -> None:
        if self._is_closed:
            self._sink(Completion(pair_seq, "the pair is closed"))
        else:
            self._queue.put((pair_seq, view))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]  # torch does not annotate it
        error = ""
        with torch.cuda.stream(stream):
            while (item := self._queue.get()) is not None:
                pair_seq, view = item
                if not error:
                    error = self._move(pair_seq, view, stream)
                self._sink(Completion(pair_seq, error))

    def _move(self, pair_seq: int, view: Tensor, stream: torch.cuda.Stream) -> str:
        try:
            if self._is_sender:
                work = self._group.send([view], pairs.RECEIVER_RANK, 0)
            else:
                work = self._group.recv([view], pairs.SENDER_RANK, 0)
                self._sink(Posted(pair_seq))
            work.wait()
            stream.synchronize()
        except RuntimeError as failure:
            return str(failure)
        return "the pair is closed" if self._is_closed else ""


class NcclConnector:
    """Opens NCCL pairs for the one rank of an engine."""

    device_type = "cuda"

    def __init__(self, stores: pairs.Stores, *, device: torch.device) -> None:
        self._stores = stores
        self._device = device

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
        def construct() -> None:
            try:
                rank = pairs.SENDER_RANK if is_sender else pairs.RECEIVER_RANK
                with self._stores.borrow(store_address) as store:
                    group = _construct(pairs.PrefixStore(prefix, store), rank=rank, size=2, device=self._device)
                    pairs.delete_join_keys(store, prefix)
            except (RuntimeError, ValueError) as error:
                on_error(f"{type(error).__name__}: {error}")
                return
            on_open(NcclTransport(group, is_sender=is_sender, device=self._device, sink=sink, name=prefix))

        pairs.in_daemon_thread(f"kv-open {prefix}", construct)

    def close(self) -> None:
        return
