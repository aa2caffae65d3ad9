"""Main of a tensor-parallel rank above 0: `python -m kvferry_engine.runner.rank FD PARENT_PID`, started by `ranks` only.

It obeys rank 0 until the socket closes. Between commands it gives its service (KV transfer) a turn; the service may wake
it from its threads. Interrupts are rank 0's business: a rank ends by Stop, by the end of the socket, or with its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from torch import Tensor

from kvferry_engine.errors import EngineError
from kvferry_engine.runner import rank_messages as messages
from kvferry_engine.runner.batch import from_message
from kvferry_engine.runner.collectives import join_group
from kvferry_engine.runner.setup import RankModel, load_source, open_configured, rank_device
from kvferry_engine.runner.threads import apply_threads, threads_per_rank

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class RankService(Protocol):
    """A part of the engine that lives in every rank. All methods are called on the rank's main thread, between steps."""

    def handle(self, payload: bytes) -> None:
        """Carry out one command of rank 0."""

    def poll(self) -> list[bytes]:
        """Do what is due and return reports for rank 0."""
        ...

    def close(self) -> None:
        """The rank stops."""


ServiceFactory = Callable[[bytes, int, Tensor, Callable[[], None]], RankService]
"""(service_setup, rank, KV storage, wake) -> service; `wake` may be called from any thread to get a `poll` soon."""


class Rank:
    """One rank above 0: its connection, its model, its service."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._wake_receiver, self._wake_sender = os.pipe()
        os.set_blocking(self._wake_receiver, False)
        os.set_blocking(self._wake_sender, False)
        self._service: RankService | None = None

    def run(self) -> None:
        """Live from Setup to Stop. Raises EOFError when rank 0 is gone, EngineError for what can be explained."""
        setup = self._receive()
        assert isinstance(setup, messages.Setup)
        apply_threads(threads_per_rank(setup.config.threads, setup.size))
        device, source = rank_device(setup.config.device, setup.rank), open_configured(setup.config)
        # From here on rank 0 waits in the meeting: what can fail has come before.
        self._send(messages.Started())
        parallel = join_group(store_path=setup.store_path, rank=setup.rank, size=setup.size, device=device)
        model = load_source(setup.config, source, parallel=parallel, device=device)
        self._send(messages.Loaded(model.available_bytes))
        allocate = self._receive()
        if isinstance(allocate, messages.Stop):
            return
        assert isinstance(allocate, messages.Allocate)
        model.allocate(num_blocks=allocate.num_blocks, max_model_len=allocate.max_model_len)
        if setup.service:
            self._service = _load_factory(setup.service)(
                setup.service_setup, setup.rank, model.executor.storage, self._wake
            )
        self._send(messages.Ready())
        try:
            self._serve(model)
        finally:
            if self._service is not None:
                self._service.close()

    def _serve(self, model: RankModel) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLIN)
        poller.register(self._wake_receiver, select.POLLIN)
        while True:
            poller.poll()
            self._clear_wake()
            if self._connection.poll(0) and not self._obey(model):
                return
            if self._service is not None:
                for payload in self._service.poll():
                    self._send(messages.FromService(payload))

    def _obey(self, model: RankModel) -> bool:
        message = self._receive()
        match message:
            case messages.RunBatch():
                model.follow(from_message(message.batch))
            case messages.ToService():
                assert self._service is not None
                self._service.handle(message.payload)
            case messages.Stop():
                return False
            case _:
                raise AssertionError(f"{type(message).__name__} does not belong here")
        return True

    def _wake(self) -> None:
        try:
            os.write(self._wake_sender, b"\0")
        except BlockingIOError:
            log.debug("a wake-up is pending already")

    def _clear_wake(self) -> None:
        try:
            os.read(self._wake_receiver, 4096)
        except BlockingIOError:
            return

    def _send(self, message: messages.RankMessage) -> None:
        self._connection.send_bytes(messages.encode(message))

    def _receive(self) -> messages.ToRank:
        return messages.decode_to_rank(self._connection.recv_bytes())

    def report_failure(self, error: EngineError) -> None:
        """Tell rank 0 why this rank exits."""
        self._send(messages.Failed(reason=error.reason, message=str(error)))


def _load_factory(path: str) -> ServiceFactory:
    module, _, function = path.partition(":")
    factory: ServiceFactory = getattr(importlib.import_module(module), function)
    return factory


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if it has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> int:
    """Run a rank until rank 0 stops it; 0 after Stop, 1 when rank 0 is gone or an error was reported."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank %(message)s")
    rank = Rank(Connection(int(sys.argv[1])))
    try:
        rank.run()
    except EngineError as error:
        rank.report_failure(error)
        return 1
    except (EOFError, ConnectionError):
        log.warning("rank 0 is gone")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
