"""`kvferry up` without a model: reading, planning, and a whole run over stand-ins for router and engine."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry_engine.wire.messages import Role
from kvferry_operator.commands import EngineAddress
from kvferry_operator.errors import PortError, SpecError
from kvferry_operator.launch import api_url, curl_line
from kvferry_operator.local import Ports, UpOptions, allot_ports, notes_for_local, plan_service, read_manifest
from kvferry_operator.machine import check_port, free_ports, usable_cores
from kvferry_operator.readiness import EngineState, RouterState, fetch_state

_HEAD = "apiVersion: kvferry.dev/v1alpha1\nkind: LLMService\n"
_MANIFEST = _HEAD + "metadata: {name: s}\nspec:\n  model: {name: m, source: {package: p}}\n  prefill: {}\n"


def _options(path: Path, text: str, **changes: object) -> UpOptions:
    path.write_text(text)
    return dataclasses.replace(UpOptions(filename=path), **changes)  # type: ignore[arg-type]


def _address(first: int) -> EngineAddress:
    return EngineAddress(host="127.0.0.1", port=first, store_port=first + 1, http_port=first + 2)


def test_cores_are_divided_over_all_ranks(tmp_path: Path) -> None:
    text = _MANIFEST + "  decode: {replicas: 2, tensorParallel: 2}\n"
    options = _options(tmp_path / "m.yaml", text)
    ports = Ports(
        api=(8000,), state=(9,), engines={Role.PREFILL: (_address(1),), Role.DECODE: (_address(4), _address(7))}
    )

    plan = plan_service(read_manifest(options.filename, None), options, ports, cores=16)

    names = [child.name for child in plan.children]
    assert names == ["router-0", "prefill-0", "decode-0", "decode-1"]
    for child in plan.children[1:]:
        assert child.environment["OMP_NUM_THREADS"] == "3"
        assert child.environment["OMP_WAIT_POLICY"] == "passive"
        assert "--threads 3 --log-level info" in " ".join(child.argv)
    assert "--prefill static:127.0.0.1:1 " in " ".join(plan.children[0].argv)
    assert "--decode static:127.0.0.1:4,127.0.0.1:7 " in " ".join(plan.children[0].argv)
    assert plan.children[0].drain_order < plan.children[1].drain_order


def test_without_prefill_engines_there_is_no_prefill_source(tmp_path: Path) -> None:
    options = _options(tmp_path / "m.yaml", _MANIFEST.replace("  prefill: {}\n", ""))
    ports = Ports(api=(8000,), state=(9,), engines={Role.PREFILL: (), Role.DECODE: (_address(1),)})

    plan = plan_service(read_manifest(options.filename, None), options, ports, cores=1)

    assert "--prefill" not in plan.children[0].argv
    assert (plan.num_prefill, plan.num_decode) == (0, 1)


def test_further_routers_take_the_next_ports(tmp_path: Path) -> None:
    first = free_ports(1, "127.0.0.1", draw=random.Random())[0]
    options = _options(tmp_path / "m.yaml", _MANIFEST + "  router: {replicas: 2}\n", port=first)
    service = read_manifest(options.filename, None)

    ports = allot_ports(service, options)
    plan = plan_service(service, options, ports, cores=2)

    assert ports.api == (first, first + 1)
    assert plan.api_urls == (f"http://127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}")
    flat = [*ports.api, *ports.state]
    flat += [port for group in ports.engines.values() for a in group for port in (a.port, a.store_port, a.http_port)]
    assert len(set(flat)) == len(flat) == 2 + 2 + 6


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = _options(tmp_path / "m.yaml", _MANIFEST, port=port)

        with pytest.raises(PortError, match=f"port {port} of 127.0.0.1 cannot be used .Address already in use"):
            allot_ports(read_manifest(options.filename, None), options)


@pytest.mark.parametrize("port", [0, 65_536])
def test_ports_that_do_not_exist(port: int) -> None:
    with pytest.raises(PortError, match="does not exist"):
        check_port("127.0.0.1", port)


def test_paths_are_relative_to_the_manifest(tmp_path: Path) -> None:
    options = _options(tmp_path / "m.yaml", _MANIFEST.replace("package: p", "path: models/x.gguf"))

    service = read_manifest(options.filename, None)

    assert service.spec.model.source.path == str(tmp_path / "models" / "x.gguf")


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        ("", None, "contains no LLMService"),
        ("kind: Secret\n", None, "contains no LLMService"),
        ("just words", None, "a manifest is an object"),
        (f"{_MANIFEST}---\n{_MANIFEST.replace('{name: s}', '{name: t}')}", None, "found: s, t; choose with --service"),
        (_MANIFEST, "other", "none of that name"),
    ],
)
def test_files_without_the_one_service(tmp_path: Path, text: str, wanted: str | None, message: str) -> None:
    options = _options(tmp_path / "m.yaml", text)

    with pytest.raises(SpecError) as caught:
        read_manifest(options.filename, wanted)

    assert message in str(caught.value)


def test_other_documents_of_the_file_are_passed_over(tmp_path: Path) -> None:
    options = _options(tmp_path / "m.yaml", f"kind: Secret\n---\n{_MANIFEST}---\n")

    assert read_manifest(options.filename, None).name == "s"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("source: {package: p}", "source: {pvc: {claimName: c}}"), "spec.model.source.pvc: only pods can mount this"),
        (("prefill: {}", "suspend: true"), "spec.suspend: the service is suspended"),
        (("prefill: {}", "expose: {apiKeySecretRef: {name: s, key: k}}"), "give the accepted keys with --api-key-file"),
    ],
)
def test_what_only_a_cluster_can_do(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    options = _options(tmp_path / "m.yaml", _MANIFEST.replace(*change))
    ports = Ports(api=(8000,), state=(9,), engines={Role.PREFILL: (), Role.DECODE: (_address(1),)})

    with pytest.raises(SpecError) as caught:
        plan_service(read_manifest(options.filename, None), options, ports, cores=1)

    assert message in str(caught.value)


def test_what_has_no_meaning_here_is_said(tmp_path: Path) -> None:
    options = _options(tmp_path / "m.yaml", _MANIFEST + "  image: {reference: r}\n  expose: {ingress: {host: h}}\n")

    notes = notes_for_local(read_manifest(options.filename, None))

    assert [note.split()[0] for note in notes] == ["spec.image", "spec.expose.ingress"]


@pytest.mark.parametrize(("content", "cores"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", None)])
def test_the_quota_limits_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(content)

    available = len(os.sched_getaffinity(0))
    assert usable_cores(path) == min(available, cores or available)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
        ("fe80::1", "http://[fe80::1]:8"),
        ("name", "http://name:8"),
    ],
)
def test_urls_name_an_address_that_can_be_reached(host: str, url: str) -> None:
    assert api_url(host, 8) == url


def test_a_service_is_ready_when_all_engines_are_usable() -> None:
    prefill, decode = EngineState(role="prefill", usable=True), EngineState(role="decode", usable=True)
    loading = EngineState(role="decode", usable=False, reason="loading")

    assert RouterState(engines=(prefill, decode)).covers(num_prefill=1, num_decode=1)
    assert not RouterState(engines=(prefill, loading)).covers(num_prefill=1, num_decode=1)
    assert not RouterState(engines=(decode,)).covers(num_prefill=1, num_decode=1)
    assert "decode 0/1 usable (loading)" in RouterState(engines=(loading,)).describe(num_prefill=0, num_decode=1)


async def test_a_router_that_does_not_answer_has_no_state() -> None:
    port = free_ports(1, "127.0.0.1", draw=random.Random())[0]

    assert await fetch_state("127.0.0.1", port) is None


_STAND_IN = '''
"""Plays router or engine: listens where it is told to and ends on signals."""
import json, os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

role, flags = sys.argv[1], dict(zip(sys.argv, sys.argv[1:]))
print(f"pid={os.getpid()}", flush=True)
if "FAIL" in os.environ and role == "engine":
    print("error: WeightsNotFound: no such package", file=sys.stderr)
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), os._exit(0)))
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        usable = "FAIL" not in os.environ
        body = json.dumps({"engines": [{"role": role, "usable": usable} for role in ("prefill", "decode")]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

port = int(flags["--metrics-port" if role == "router" else "--http-port"])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''

_RUN_UP = """
import logging, sys
from kvferry_operator import launch, local
from kvferry_operator.errors import OperatorError
from pathlib import Path
logging.basicConfig(level="INFO", format="kvferry: %(message)s")
local.PROGRAM = (sys.executable, sys.argv[1])
try:
    code = local.run_up(local.UpOptions(filename=Path(sys.argv[2]), port=int(sys.argv[3])), lambda line: print(line, flush=True))
except OperatorError as error:
    print(f"error: {error}", flush=True)
    code = 1
sys.exit(code)
"""


class _Up:
    """A running `kvferry up` over stand-ins; `lines` are what it wrote on standard error."""

    def __init__(self, tmp_path: Path, environment: dict[str, str]) -> None:
        stand_in, manifest = tmp_path / "stand_in.py", tmp_path / "m.yaml"
        stand_in.write_text(_STAND_IN)
        manifest.write_text(_MANIFEST)
        port = free_ports(1, "127.0.0.1", draw=random.Random())[0]
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_RUN_UP), str(stand_in), str(manifest), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def wait_until_ready(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(30)
        return code

    def pids(self) -> list[int]:
        return [int(line.partition("pid=")[2]) for line in self.lines if "pid=" in line]

    def wait_for_pids(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.pids()) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(self.pids()) == count

    def assert_no_child_is_left(self) -> None:
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.pids())


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], _Up]]:
    """Start `kvferry up` with given environment variables; whatever still runs at the end of the test is killed."""
    started: list[_Up] = []

    def start(environment: dict[str, str]) -> _Up:
        started.append(_Up(tmp_path, environment))
        return started[-1]

    yield start
    for up in started:
        up.process.kill()
        up.end()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_service_comes_up_and_every_signal_leaves_nothing(
    start_up: Callable[[dict[str, str]], _Up], number: signal.Signals, code: int
) -> None:
    up = start_up({})

    first = up.wait_until_ready()
    assert first.startswith("s is ready after ")
    up.wait_for_pids(3)

    assert up.end(number) == code
    assert len(up.pids()) == 3
    up.assert_no_child_is_left()
    if number is signal.SIGTERM:
        drained = [line.split()[0] for line in up.lines if line.rstrip().endswith("drained")]
        assert drained[0] == "router-0"
        assert sorted(drained[1:]) == ["decode-0", "prefill-0"]


@pytest.mark.slow
def test_a_killed_engine_comes_back_on_its_ports(start_up: Callable[[dict[str, str]], _Up]) -> None:
    up = start_up({})
    up.wait_until_ready()
    up.wait_for_pids(3)

    os.kill(up.pids()[-1], signal.SIGKILL)
    up.wait_for_pids(4)

    assert up.end(signal.SIGINT) == 130
    assert any("ended (SIGKILL), starting again" in line for line in up.lines)
    up.assert_no_child_is_left()


@pytest.mark.slow
def test_a_model_that_is_missing_ends_it_with_one_line(start_up: Callable[[dict[str, str]], _Up]) -> None:
    up = start_up({"FAIL": "1"})

    assert up.process.stdout is not None
    assert up.process.stdout.readline().endswith("-0: WeightsNotFound: no such package\n")
    assert up.end() == 1
    up.assert_no_child_is_left()


@pytest.mark.slow
def test_a_signal_during_start_up_leaves_nothing(start_up: Callable[[dict[str, str]], _Up]) -> None:
    draw = random.Random(7)
    for _ in range(4):
        up = start_up({})
        time.sleep(draw.uniform(0.1, 0.6))

        up.end(draw.choice([signal.SIGINT, signal.SIGTERM]))

        up.assert_no_child_is_left()


def test_the_curl_line_is_one_command_with_valid_json(tmp_path: Path) -> None:
    options = _options(tmp_path / "m.yaml", _MANIFEST, api_key_file=tmp_path / "keys")
    ports = Ports(api=(8000,), state=(9,), engines={Role.PREFILL: (), Role.DECODE: (_address(1),)})
    plan = plan_service(read_manifest(options.filename, None), options, ports, cores=1)

    line = curl_line(plan)

    assert json.loads(line.split("-d '")[1].removesuffix("'"))["model"] == "m"
    assert "authorization: Bearer KEY" in line
