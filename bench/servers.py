"""Servers that a comparison starts, asks and stops: their command lines, time to a first answer, memory of all processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_POLL_S = 0.1
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_KIB = 1024


class BenchError(Exception):
    """A server did not start or a measurement failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One way of serving the model under test on `port` as model `bench`."""

    name: str
    argv: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """A started server; `first_answer_s` counts from the start of its process to the end of one short answer."""

    process: subprocess.Popen[bytes]
    first_answer_s: float

    def pss_bytes(self) -> int:
        """Return the proportional set size of the whole process tree."""
        return sum(_pss_bytes(pid) for pid in process_tree(self.process.pid))


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start a server, wait for its first answer, stop it with all its processes. Raises BenchError."""
    with log.open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            server.argv,
            env={**os.environ, **server.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for_answer(server, process, log)
        yield Running(process, time.monotonic() - started)
    finally:
        tree = process_tree(process.pid)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and everything below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [root] if root in parents else []
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def _wait_for_answer(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    body = json.dumps({"model": "bench", "prompt": "Hello", "max_tokens": 1}).encode()
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"{server.name} ended with code {process.returncode}; see {log}")
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/completions", data=body, headers={"content-type": "application/json"}
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60):
            return
        time.sleep(_POLL_S)
    raise BenchError(f"{server.name} did not answer within {_START_TIMEOUT_S:.0f} s; see {log}")


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("Pss:")), 0)
