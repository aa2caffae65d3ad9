"""An engine and a router ended at any moment, start-up and load included: no process, no shared memory, no port is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.checkpoints import make_checkpoint
from kit.cluster import Cluster, Process, free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_FLAGS = ["--max-model-len", "512", "--num-gpu-blocks-override", "64"]
_PROMPT = list(range(20, 60))


class Leftovers:
    """What was started with `environment` and what it may leave behind."""

    def __init__(self) -> None:
        self._marker = f"KVFERRY_TEST_RUN={random.getrandbits(64)}"
        self._shared_memory = self._segments()
        name, _, value = self._marker.partition("=")
        self.environment = {name: value}

    def processes(self) -> list[int]:
        """Ids of living processes that inherited the environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                is_ours = self._marker.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_ours:
                found.append(int(entry.name))
        return found

    def assert_none(self, ports: list[int]) -> None:
        """Fail when something is left 20 s from now; ports are free when they can be bound again."""
        wait_for(lambda: not self.processes(), timeout_s=20.0, what="every process is gone")
        assert self._segments() - self._shared_memory == set()
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                pass

    @staticmethod
    def _segments() -> set[str]:
        names = (entry.name for entry in Path("/dev/shm").iterdir())
        return {name for name in names if name.startswith(("kvferry", "psm_", "torch_", "gloo"))}


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    made = Leftovers()
    yield made
    for process in made.processes():
        os.kill(process, signal.SIGKILL)


def _ports_of(process: Process) -> list[int]:
    return [int(process.argv[process.argv.index(flag) + 1]) for flag in ("--port", "--store-port", "--http-port")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_ended_while_it_starts_leaves_nothing(
    number: signal.Signals, num_ranks: int, leftovers: Leftovers
) -> None:
    model = str(make_checkpoint("llama"))
    draw = random.Random(f"{number} {num_ranks}")
    for delay_s in (0.2, draw.uniform(0.5, 2.0), draw.uniform(2.0, 5.0), draw.uniform(5.0, 9.0)):
        ports = free_ports(3)
        flags = ["--port", str(ports[0]), "--store-port", str(ports[1]), "--http-port", str(ports[2]), *_FLAGS]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", "engine", model, "--threads", "1", "-tp", str(num_ranks), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **leftovers.environment},
        )

        time.sleep(delay_s)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)

        assert process.returncode in (0, 128 + number, -number), (delay_s, process.returncode, errors.decode())
        assert b"Traceback" not in errors, (delay_s, errors.decode())
        leftovers.assert_none(ports)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_and_router_ended_under_load_leave_nothing(
    number: signal.Signals, num_ranks: int, leftovers: Leftovers
) -> None:
    draw = random.Random(f"{number} {num_ranks}")
    with Cluster(str(make_checkpoint("llama")), engine_flags=_FLAGS) as cluster:
        engine = cluster.add_engine(
            "d0", "both", "-tp", str(num_ranks), "--drain-seconds", "1", env=leftovers.environment
        )
        router = cluster.add_router("--shutdown-delay", "0", "--shutdown-timeout", "1")
        cluster.wait_ready()
        num_tokens = [0, 0]

        def read(which: int) -> None:
            def count(number_read: int) -> None:
                num_tokens[which] = number_read

            # Either end of a stream is fine: cut off, or an error event, which `stream` asserts on.
            try:
                cluster.stream([which, *_PROMPT], 400, on_token=count)
            except (OSError, AssertionError, ValueError):
                return

        readers = [threading.Thread(target=read, args=(which,)) for which in range(2)]
        for reader in readers:
            reader.start()
        wait_for(lambda: all(num_tokens), timeout_s=60.0, what="both streams run")
        time.sleep(draw.uniform(0.0, 0.3))

        engine.signal(number)
        engine_code = engine.wait()
        router.signal(number)
        router_code = router.wait()
        for reader in readers:
            reader.join(60)

        assert not any(reader.is_alive() for reader in readers)
        assert engine_code == 0
        assert router_code in (0, 130)
        assert "Traceback" not in engine.log() + router.log()
        router_port = int(router.argv[router.argv.index("--port") + 1])
        leftovers.assert_none([*_ports_of(engine), router_port, router.http_port])
