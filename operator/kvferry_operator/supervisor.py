"""A small supervisor: keeps named child processes running, shows their output, and leaves none behind.

Each child leads a session of its own, so that a terminal's Ctrl-C reaches only the supervisor, which decides; a child
dies with the supervisor even when that is killed (PR_SET_PDEATHSIG). A dead child is started again, with a growing
pause, by the same command line. Before the service was ready once, a child that says it can never start ends everything
instead.

Exit codes of children: 1 or 2 with a line `error: ...` (or `program: error: ...`) is permanent; all others, and death
by a signal, are worth another try.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TextIO

from kvferry_operator.errors import ChildFailedError

_logger = logging.getLogger(__name__)

PERMANENT_EXIT_CODES = (1, 2)
_ERROR_LINE = re.compile(r"^(?:[\w ./-]+: )?error: (?P<message>.+)$")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAX_LINE_BYTES = 1 << 16
_PROGRESS_INTERVAL_S = 1.0
_LAST_OUTPUT_S = 1.0


class Stop(StrEnum):
    """How a running service ends."""

    NOW = "now"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to keep running.

    Children drain in ascending `drain_order`: those with a lower one have ended before those with a higher one begin.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    drain_order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Times of a supervisor."""

    backoff_first_s: float = 0.5
    backoff_most_s: float = 10.0
    backoff_reset_s: float = 30.0
    """A child that ran this long starts again with the first pause."""
    grace_s: float = 5.0
    """Time between asking a child to stop now and killing it."""
    drain_s: float = 150.0
    """Longest drain of one group of children."""
    most_start_failures: int = 5
    """Failures in a row, before the service was ever ready, after which a child counts as unable to start."""


class OutputPrinter:
    """Writes children's lines to one stream, each behind its child's name, in a colour of its own on a terminal."""

    _COLOURS = (36, 33, 32, 35, 34, 31)

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        self._stream = stream
        width = max((len(name) for name in names), default=0)
        coloured = stream.isatty()
        self._prefixes = {}
        for index, name in enumerate(names):
            prefix = f"{name:<{width}} | "
            colour = self._COLOURS[index % len(self._COLOURS)]
            self._prefixes[name] = f"\x1b[{colour}m{prefix}\x1b[0m" if coloured else prefix

    def line(self, name: str, text: str) -> None:
        """Write one line. A reader that has gone away is no reason to stop serving."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(f"{self._prefixes[name]}{text}\n")
            self._stream.flush()


class Child:
    """A running or restarting child and what it said last."""

    def __init__(self, spec: ChildSpec, settings: SupervisorSettings, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self.failures = 0
        """Failed starts in a row that count towards `most_start_failures`."""
        self.last_line = ""
        self.last_error = ""
        self._settings = settings
        self._on_line = on_line
        self._pause_s = settings.backoff_first_s
        self._asked: signal.Signals | None = None

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    async def run_once(self) -> int:
        """Start the process, relay its output, and return its exit code (negative: the signal that ended it)."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.last_line = self.last_error = ""
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
                preexec_fn=_before_exec(os.getpid()),
            )
        except OSError as error:
            raise ChildFailedError(f"{self.spec.name}: cannot run {self.spec.argv[0]}: {error.strerror}") from error
        self.starts += 1
        if self._asked is not None:
            self._send(self._asked)
        _logger.debug("child started name=%s pid=%d", self.spec.name, self.process.pid)
        relay = asyncio.create_task(self._relay(self.process))
        code = await self.process.wait()
        # Ranks and helpers of a dead engine must not keep its ports or its output pipe.
        self.kill_group()
        await asyncio.wait([relay], timeout=_LAST_OUTPUT_S)
        relay.cancel()
        if loop.time() - started >= self._settings.backoff_reset_s:
            self._pause_s = self._settings.backoff_first_s
            self.failures = 0
        if code > 0:
            self.failures += 1
        return code

    def next_pause_s(self) -> float:
        """Return the pause before the next start and double the one after."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._settings.backoff_most_s)
        return pause_s

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to the process; one that is just being started gets it as soon as it exists."""
        self._asked = number
        self._send(number)

    def kill_group(self) -> None:
        """SIGKILL the process and all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Pass lines on until the pipe closes; of a progress bar's redrawn line only one a second."""
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        pending = b""
        last_progress = float("-inf")
        while chunk := await process.stdout.read(_MAX_LINE_BYTES):
            pending += chunk
            *complete, pending = re.split(rb"(?<=[\r\n])", pending)
            for raw in complete:
                text = raw.decode("utf-8", "replace").rstrip()
                if not text:
                    continue
                if raw.endswith(b"\r"):
                    if loop.time() - last_progress < _PROGRESS_INTERVAL_S:
                        continue
                    last_progress = loop.time()
                self._heard(text)
            if len(pending) > _MAX_LINE_BYTES:
                self._heard(pending.decode("utf-8", "replace"))
                pending = b""
        if pending.strip():
            self._heard(pending.decode("utf-8", "replace").rstrip())

    def _heard(self, text: str) -> None:
        self.last_line = text
        if match := _ERROR_LINE.match(text):
            self.last_error = match["message"]
        self._on_line(self.spec.name, text)


class Supervisor:
    """Runs children until told to stop. Everything happens in one event loop."""

    def __init__(self, specs: Sequence[ChildSpec], settings: SupervisorSettings, printer: OutputPrinter) -> None:
        self._settings = settings
        self.children = [Child(spec, settings, printer.line) for spec in specs]
        self._was_ready = False
        self._stop: Stop | None = None
        self._stop_changed = asyncio.Event()

    def mark_ready(self) -> None:
        """Say that the service was ready once: from now on every death is worth another try."""
        self._was_ready = True

    def request_stop(self, how: Stop) -> None:
        """Ask `run` to end. Any second request ends it now."""
        self._stop = how if self._stop is None else Stop.NOW
        self._stop_changed.set()

    async def run(self) -> None:
        """Keep all children running until `request_stop`, then end them; on return none is left.

        Raises ChildFailedError when a child cannot start, after the others have been ended.
        """
        keepers = [asyncio.create_task(self._keep(child), name=child.spec.name) for child in self.children]
        stopping = asyncio.create_task(self._stop_changed.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stopping:
                    task.result()
            if self._stop is Stop.DRAIN:
                await self._drain(dict(zip(self.children, keepers, strict=True)))
        finally:
            stopping.cancel()
            self._stop = Stop.NOW
            await self._end_all(keepers)

    async def _keep(self, child: Child) -> None:
        while self._stop is None:
            code = await child.run_once()
            if self._stop is not None:
                return
            if not self._was_ready:
                self._raise_if_permanent(child, code)
            pause_s = child.next_pause_s()
            _logger.warning("%s ended (%s), starting again in %.1f s", child.spec.name, _cause(code), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_changed.wait(), pause_s)

    def _raise_if_permanent(self, child: Child, code: int) -> None:
        name = child.spec.name
        if code in PERMANENT_EXIT_CODES and child.last_error:
            raise ChildFailedError(f"{name}: {child.last_error}")
        if child.failures >= self._settings.most_start_failures:
            last = child.last_line or "it printed nothing"
            raise ChildFailedError(f"{name} failed {child.failures} times in a row ({_cause(code)}): {last}")

    async def _drain(self, keepers: dict[Child, asyncio.Task[None]]) -> None:
        """SIGTERM group after group; a second stop request, or the time limit, ends the wait."""
        self._stop_changed.clear()
        urgent = asyncio.create_task(self._stop_changed.wait())
        try:
            for order in sorted({child.spec.drain_order for child in keepers}):
                group = [child for child in keepers if child.spec.drain_order == order]
                for child in group:
                    child.ask(signal.SIGTERM)
                ended = asyncio.create_task(asyncio.wait([keepers[child] for child in group]))
                waits: list[asyncio.Task[Any]] = [ended, urgent]
                await asyncio.wait(waits, timeout=self._settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if urgent.done():
                    return
        finally:
            urgent.cancel()

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """SIGINT everything that runs, SIGKILL it with all it started when the grace is over."""
        self._stop_changed.set()
        for child in self.children:
            child.ask(signal.SIGINT)
        running = [task for task in keepers if not task.done()]
        if running:
            await asyncio.wait(running, timeout=self._settings.grace_s)
        for child in self.children:
            child.kill_group()
        await asyncio.gather(*keepers, return_exceptions=True)


def _before_exec(parent: int) -> Callable[[], None]:
    """Return what a child runs before exec: default signals, and death with the parent, also if that died just now."""

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def make_printer(names: Sequence[str]) -> OutputPrinter:
    """Return a printer on standard error; standard output is for what scripts read."""
    return OutputPrinter(sys.stderr, names)
