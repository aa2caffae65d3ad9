"""Payloads over a gloo pair: threads that only block in `wait()`, tags from `pair_seq`, tombstones instead of cancellation.

gloo sends are rendezvous (they end when the receive is posted), a shorter send completes a longer receive, and nothing but a
timed-out operation releases a blocked one; `tests/transfer/test_gloo_facts.py` keeps these facts for the locked torch.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from kvferry_engine.transfer import pairs
from kvferry_engine.transfer.staging import TOMBSTONE_BYTES
from kvferry_engine.transfer.transport.base import Completion, Sink, Transport

log = logging.getLogger(__name__)

TAG_MODULUS = 1 << 31
RELEASE_TAG = TAG_MODULUS - 1
RELEASE_WAIT = timedelta(milliseconds=1)
SENDS_AHEAD = 2
"""Sends posted at once, so that the wire does not idle between two waits."""


def release_blocked(group: pairs.PairGroup, peer: int) -> None:
    """End every blocked operation of a gloo group with an error: a receive nobody answers times out, which closes the pair."""
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, RELEASE_TAG).wait(RELEASE_WAIT)
    except RuntimeError:
        return
    log.error("gloo answered a receive that nobody sent; the pair may stay blocked")


class _GlooEnd:
    """What both ends share: the closing of a group, once, from the rank's main thread."""

    needs_launch = False

    def __init__(self, group: pairs.PairGroup, *, peer: int, sink: Sink) -> None:
        self._group = group
        self._peer = peer
        self._sink = sink
        self._is_closed = False

    def launch(self, pair_seq: int) -> None:
        raise AssertionError("gloo sends wait for nobody")

    def _wait(self, pair_seq: int, work: pairs.Work) -> None:
        """Block until an operation ended and report it."""
        try:
            work.wait()
        except RuntimeError as error:
            self._sink(Completion(pair_seq, str(error)))
        else:
            self._sink(Completion(pair_seq))


class GlooReceiver(_GlooEnd):
    """Rank 1 of a pair. Receives are posted at once; the thread waits for them in order."""

    def __init__(self, group: pairs.PairGroup, *, sink: Sink, name: str) -> None:
        super().__init__(group, peer=pairs.SENDER_RANK, sink=sink)
        self._posted: queue.SimpleQueue[tuple[int, pairs.Work, Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-recv {name}", daemon=True)
        self._thread.start()

    def post_recv(self, pair_seq: int, view: Tensor) -> None:
        if self._is_closed:
            self._sink(Completion(pair_seq, "the pair is closed"))
            return
        try:
            work = self._group.recv([view], self._peer, pair_seq % TAG_MODULUS)
        except RuntimeError as error:
            self._sink(Completion(pair_seq, str(error)))
            return
        self._posted.put((pair_seq, work, view))

    def send(self, pair_seq: int, view: Tensor) -> None:
        raise AssertionError("this end receives")

    def cancel(self, pair_seq: int) -> None:
        raise AssertionError("this end receives")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        release_blocked(self._group, self._peer)
        self._posted.put(None)

    def _run(self) -> None:
        while (item := self._posted.get()) is not None:
            pair_seq, work, _ = item
            self._wait(pair_seq, work)


class GlooSender(_GlooEnd):
    """Rank 0 of a pair. The thread posts sends in order, a few ahead; what it has not posted can still become a tombstone."""

    def __init__(self, group: pairs.PairGroup, *, sink: Sink, name: str) -> None:
        super().__init__(group, peer=pairs.RECEIVER_RANK, sink=sink)
        self._queued: queue.SimpleQueue[tuple[int, Tensor] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._thread = threading.Thread(target=self._run, name=f"kv-send {name}", daemon=True)
        self._thread.start()

    def post_recv(self, pair_seq: int, view: Tensor) -> None:
        raise AssertionError("this end sends")

    def send(self, pair_seq: int, view: Tensor) -> None:
        if self._is_closed:
            self._sink(Completion(pair_seq, "the pair is closed"))
            return
        self._queued.put((pair_seq, view))

    def cancel(self, pair_seq: int) -> None:
        self._cancelled.add(pair_seq)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        release_blocked(self._group, self._peer)
        self._queued.put(None)

    def _run(self) -> None:
        posted: deque[tuple[int, pairs.Work, Tensor]] = deque()
        while True:
            while len(posted) < SENDS_AHEAD:
                try:
                    item = self._queued.get(block=not posted)
                except queue.Empty:
                    break
                if item is None:
                    for pair_seq, work, _ in posted:
                        self._wait(pair_seq, work)
                    return
                self._post(item[0], item[1], posted)
            pair_seq, work, _ = posted.popleft()
            self._wait(pair_seq, work)

    def _post(self, pair_seq: int, view: Tensor, posted: deque[tuple[int, pairs.Work, Tensor]]) -> None:
        if pair_seq in self._cancelled:
            self._cancelled.discard(pair_seq)
            view = view[:TOMBSTONE_BYTES]
        try:
            posted.append((pair_seq, self._group.send([view], self._peer, pair_seq % TAG_MODULUS), view))
        except RuntimeError as error:
            self._sink(Completion(pair_seq, str(error)))


class GlooConnector:
    """Opens gloo pairs for one rank process over one device: one port, one thread for all pairs."""

    device_type = "cpu"

    def __init__(self, stores: pairs.Stores, *, host: str) -> None:
        """`host`: the address of this machine that peers reach."""
        self._stores = stores
        self._device = ProcessGroupGloo.create_device(hostname=host)

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
                with self._stores.borrow(store_address) as store:
                    group = pairs.open_gloo_group(store, prefix, is_sender=is_sender, device=self._device)
            except (RuntimeError, ValueError) as error:
                on_error(f"{type(error).__name__}: {error}")
                return
            end = GlooSender if is_sender else GlooReceiver
            on_open(end(group, sink=sink, name=prefix))

        pairs.in_daemon_thread(f"kv-open {prefix}", construct)

    def close(self) -> None:
        return
