"""Rank 0's side of tensor parallelism: starts the other ranks, drives them over local sockets, and notices when one dies.

Each rank is a process of its own (`rank` is its main) with one end of a socket pair. Any rank's death ends the engine: its
socket hangs up, a watching thread says so, and every later call raises RankDiedError.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from kvferry_engine.config import EngineConfig
from kvferry_engine.errors import EngineError
from kvferry_engine.runner import rank_messages as messages
from kvferry_engine.runner.batch import ForwardBatch, to_message
from kvferry_engine.runner.threads import make_openmp_passive, threads_per_rank

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
POLL_MS = 1000

_Expected = TypeVar("_Expected", bound=messages.RankMessage)


class RankDiedError(EngineError):
    """A tensor-parallel rank exited or failed; the engine cannot go on."""

    reason = "RankDied"


class RankGroup:
    """The ranks 1 .. size - 1 of an engine, seen from rank 0. Use from one thread, `on_death` is called from another."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        service: str = "",
        service_setup: bytes = b"",
        on_death: Callable[[RankDiedError], None] | None = None,
    ) -> None:
        """Start the processes and wait until they run. Raises RankDiedError when one does not.

        `service`: module:function making the `rank.RankService` of each rank; `service_setup` is handed to it. `on_death`
        is told once, within about a second of a death, also while nothing is being computed.
        """
        self.size = config.tensor_parallel_size
        self._folder = tempfile.mkdtemp(prefix="kvferry-ranks-")
        self.store_path = str(Path(self._folder, "store"))
        self._on_death = on_death
        self._death: RankDiedError | None = None
        self._is_closing = False
        self._events: list[tuple[int, bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        environment = os.environ.copy()
        make_openmp_passive(environment)
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(config.threads, self.size))
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        try:
            for rank in range(1, self.size):
                self._start(rank, environment)
            self._watcher.start()
            for rank in range(1, self.size):
                setup = messages.Setup(
                    rank=rank,
                    size=self.size,
                    config=config,
                    store_path=self.store_path,
                    service=service,
                    service_setup=service_setup,
                )
                self._send(rank, messages.encode(setup))
            for rank in range(1, self.size):
                self._expect(rank, messages.Started)
        except BaseException:
            self.close()
            raise

    def wait_loaded(self) -> int:
        """Wait until every rank has its weights; return the smallest KV memory (bytes) among them. Raises RankDiedError."""
        return min(self._expect(rank, messages.Loaded).available_bytes for rank in range(1, self.size))

    def allocate(self, *, num_blocks: int, max_model_len: int) -> None:
        """Let every rank make its KV cache (and record graphs); returns at once, `wait_ready` waits. Raises RankDiedError."""
        self._send_all(messages.encode(messages.Allocate(num_blocks=num_blocks, max_model_len=max_model_len)))

    def wait_ready(self) -> None:
        """Wait until every rank can compute. Raises RankDiedError."""
        for rank in range(1, self.size):
            self._expect(rank, messages.Ready)

    def run(self, batch: ForwardBatch) -> None:
        """Let every rank compute a batch; rank 0 must do the same right after. Raises RankDiedError."""
        self._send_all(messages.encode(messages.RunBatch(to_message(batch))))

    def send_service(self, rank: int, payload: bytes) -> None:
        """Hand a payload to the service of one rank, in order with batches. Raises RankDiedError."""
        self._send(rank, messages.encode(messages.ToService(payload)))

    def poll_service(self) -> list[tuple[int, bytes]]:
        """Return what services reported since the last call, as (rank, payload). Never blocks. Raises RankDiedError."""
        self.check()
        for rank, connection in enumerate(self._connections, start=1):
            while connection.poll(0):
                message = self._receive(rank)
                assert isinstance(message, messages.FromService)
                self._events.append((rank, message.payload))
        events, self._events = self._events, []
        return events

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a service has reported, for the idle wait of the core."""
        return [connection.fileno() for connection in self._connections]

    def check(self) -> None:
        """Raise RankDiedError if a rank is gone."""
        if self._death is not None:
            raise self._death

    def death(self, timeout_s: float) -> RankDiedError | None:
        """Return the death that explains a failed collective, waiting up to `timeout_s` for it to be noticed."""
        if self._death is None:
            self._watcher.join(timeout_s)
        return self._death

    def close(self) -> None:
        """Stop the ranks and remove what they met at; kills those that do not stop within five seconds. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for connection in self._connections:
            try:
                connection.send_bytes(messages.encode(messages.Stop()))
            except OSError:
                log.debug("rank is gone already")
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("rank does not stop, killing it pid=%d", process.pid)
                process.kill()
                process.wait()
        if self._watcher.is_alive():
            self._watcher.join(STOP_TIMEOUT_S)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [sys.executable, "-m", "kvferry_engine.runner.rank", str(theirs.fileno()), str(os.getpid())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
        self._connections.append(Connection(ours.detach()))
        log.info("rank started rank=%d pid=%d", rank, self._processes[-1].pid)

    def _watch(self) -> None:
        """Wait for a hang-up of any rank. Runs on its own thread, reads nothing."""
        poller = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in enumerate(self._connections, start=1)}
        for fileno in ranks:
            poller.register(fileno, 0)
        while True:
            for fileno, _ in poller.poll(POLL_MS):
                if not self._is_closing:
                    self._record_death(ranks[fileno], self._exit_status(ranks[fileno]))
                return

    def _exit_status(self, rank: int) -> str:
        try:
            return f"exited with status {self._processes[rank - 1].wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def _record_death(self, rank: int, what: str, *, is_explained: bool = False) -> RankDiedError:
        """Remember the first death, or the explanation that arrives after the watcher has seen the exit."""
        death = self._death
        if death is not None and not is_explained:
            return death
        self._death = RankDiedError(f"tensor-parallel rank {rank} {what}")
        log.error("rank died rank=%d what=%s", rank, what)
        if death is None and self._on_death is not None:
            self._on_death(self._death)
        return self._death

    def _send(self, rank: int, data: bytes) -> None:
        self.check()
        try:
            self._connections[rank - 1].send_bytes(data)
        except OSError as error:
            raise self._record_death(rank, self._exit_status(rank)) from error

    def _send_all(self, data: bytes) -> None:
        for rank in range(1, self.size):
            self._send(rank, data)

    def _receive(self, rank: int) -> messages.FromRank:
        try:
            message = messages.decode_from_rank(self._connections[rank - 1].recv_bytes())
        except (OSError, EOFError) as error:
            raise self._record_death(rank, self._exit_status(rank)) from error
        if isinstance(message, messages.Failed):
            raise self._record_death(rank, f"failed ({message.reason}): {message.message}", is_explained=True)
        return message

    def _expect(self, rank: int, kind: type[_Expected]) -> _Expected:
        """Wait for a message of this kind; service reports that come before it are kept."""
        while True:
            message = self._receive(rank)
            if isinstance(message, kind):
                return message
            assert isinstance(message, messages.FromService)
            self._events.append((rank, message.payload))
