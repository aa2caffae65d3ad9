"""What a person gets for a start that cannot work: one line that says what to do, the exit code, and never a traceback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.checkpoints import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_ANY_PORTS = {"--port": "0", "--store-port": "0", "--http-port": "0"}


@pytest.fixture
def taken() -> Iterator[str]:
    """A port where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def _kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def _engine(model: str | Path, **flags: str) -> subprocess.CompletedProcess[str]:
    given = _ANY_PORTS | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return _kvferry("engine", str(model), "--threads", "1", *(part for pair in given.items() for part in pair))


def _line(done: subprocess.CompletedProcess[str]) -> str:
    """The one error line of a start that failed for a reason; everything else about it is checked here."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1] == line
    return line


def _usage_line(done: subprocess.CompletedProcess[str], command: str) -> str:
    """The one line of a command line that cannot be read."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvferry {command}: error: ")
    assert line.endswith(f"(see kvferry {command} --help)")
    return line


def _corrupt_gguf(folder: Path) -> Path:
    path = folder / "broken.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 200)
    return path


def _truncated_checkpoint(folder: Path) -> Path:
    path = shutil.copytree(make_checkpoint("llama"), folder / "truncated")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return path


# --- the model ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    line = _line(_engine(tmp_path / "nowhere"))

    assert f"there is no {tmp_path / 'nowhere'}" in line
    assert "give a folder with config.json" in line


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "neither config.json nor a .gguf file" in _line(_engine(tmp_path))


def test_a_corrupt_gguf_file(tmp_path: Path) -> None:
    assert f"{tmp_path / 'broken.gguf'} is cut short or damaged" in _line(_engine(_corrupt_gguf(tmp_path)))


def test_truncated_safetensors(tmp_path: Path) -> None:
    line = _line(_engine(_truncated_checkpoint(tmp_path)))

    assert "model.safetensors has" in line
    assert "download it again" in line


# --- flags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": "3"}, "tensor parallel size 3 does not divide the model's 4 attention heads"),
        ({"tensor_parallel_size": "0"}, "--tensor-parallel-size 0: allowed is at least 1"),
        ({"gpu_memory_utilization": "nan"}, "--gpu-memory-utilization nan"),
        ({"staging_slot_bytes": "0"}, "--staging-slot-bytes 0"),
        ({"max_model_len": "0"}, "--max-model-len 0 is not positive"),
        ({"max_model_len": "100000"}, "--max-model-len 100000"),
        ({"block_size": "7"}, "--block-size 7 is not supported; use one of 16, 32, 64, 128"),
        ({"max_num_seqs": "0"}, "--max-num-seqs 0"),
        ({"max_num_batched_tokens": "0"}, "--max-num-batched-tokens 0"),
        ({"num_gpu_blocks_override": "0"}, "--num-gpu-blocks-override 0"),
        ({"kv_cache_memory_bytes": "1"}, "--kv-cache-memory-bytes"),
        ({"threads": "0"}, "--threads 0"),
        ({"staging_slots": "0"}, "--staging-slots 0"),
        ({"port": "70000"}, "--port 70000: allowed is 0 (any free port) to 65535"),
        ({"store_port": "70000"}, "--store-port 70000"),
        ({"http_port": "70000"}, "--http-port 70000"),
        ({"log_level": "loud"}, "--log-level loud"),
        ({"wire_secret_file": "/nowhere/secret"}, "--wire-secret-file /nowhere/secret cannot be read"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 would open the wire to the network without a secret"),
        ({"host": "192.0.2.1"}, "192.0.2.1"),
    ],
    ids=lambda value: "-".join(f"{k}-{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_value_that_cannot_work(flags: dict[str, str], message: str) -> None:
    assert message in _line(_engine(make_checkpoint("llama"), **flags))


def test_a_secret_that_is_too_short(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short\n")

    assert "at least 16 bytes" in _line(_engine(make_checkpoint("llama"), wire_secret_file=str(secret)))


@pytest.mark.parametrize("flag", ["port", "store_port", "http_port"])
def test_a_port_in_use(flag: str, taken: str) -> None:
    line = _line(_engine(make_checkpoint("llama"), **{flag: taken}))

    assert f"port {taken} on 127.0.0.1 is in use" in line
    assert f"choose another --{flag.replace('_', '-')}" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("engine", "m", "--no-such-flag"), "unrecognized arguments: --no-such-flag"),
        (("engine",), "a MODEL is required"),
        (("engine", "m", "--dtype", "float99"), "allowed: auto, bfloat16, float16, float32"),
        (("engine", "m", "--port", "http"), "'http' is not a whole number"),
        (("serve", "m", "--no-such-flag"), "unrecognized arguments: --no-such-flag"),
        (("serve",), "a MODEL is required"),
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: tuple[str, ...], message: str) -> None:
    assert message in _usage_line(_kvferry(*arguments), arguments[0])


# --- serve --------------------------------------------------------------------------------------------------------------


def test_serve_on_a_port_in_use(taken: str) -> None:
    assert f"port {taken}" in _line(_kvferry("serve", str(make_checkpoint("llama")), "--port", taken))


@pytest.mark.parametrize("case", ["missing", "gguf", "safetensors", "block size"])
def test_serve_tells_what_its_engine_cannot_do_and_ends(case: str, tmp_path: Path, unused_port: str) -> None:
    model, flags, message = {
        "missing": (tmp_path / "nowhere", (), "there is no"),
        "gguf": (_corrupt_gguf(tmp_path), (), "cut short or damaged"),
        "safetensors": (_truncated_checkpoint(tmp_path), (), "download it again"),
        "block size": (make_checkpoint("llama"), ("--block-size", "7"), "--block-size 7 is not supported"),
    }[case]

    done = _kvferry("serve", str(model), "--host", "127.0.0.1", "--port", unused_port, *flags)

    assert message in _line(done)


@pytest.fixture
def unused_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])
