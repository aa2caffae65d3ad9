"""Real kvferry processes for end-to-end tests, on free loopback ports: started, killed, frozen and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0


def free_ports(count: int) -> list[int]:
    """`count` distinct TCP ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "condition") -> Any:
    """Poll until `condition` is truthy and return it; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s:.0f} s")
        time.sleep(0.02)


def get(url: str, *, timeout_s: float = 5.0) -> tuple[int, str]:
    """GET; (status, body); status 0 when nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@dataclass(eq=False)
class Process:
    """One child process with its log file."""

    name: str
    argv: list[str]
    http_port: int
    log_path: Path
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.log_path.open("ab")
        self.popen = subprocess.Popen(
            self.argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.env}
        )
        log.close()

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self.popen is not None
        return self.popen.wait(timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Metric samples by name, summed over labels."""
        _, text = get(f"http://127.0.0.1:{self.http_port}/metrics")
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name = line.split("{", 1)[0].split(" ", 1)[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values


class Cluster:
    """Engines by name plus one router. Use as a context manager; everything is killed at the end."""

    def __init__(self, model: str, *, dtype: str = "float32", engine_flags: list[str] | None = None) -> None:
        self.model = model
        self.directory = Path(tempfile.mkdtemp(prefix="kvferry-test-"))
        self.engine_flags = ["--dtype", dtype, *(engine_flags or [])]
        self.engines: dict[str, Process] = {}
        self.addresses: dict[str, str] = {}
        self.router: Process | None = None
        self.url = ""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():
            if process.is_running:
                process.signal(signal.SIGCONT)
                process.kill()
        if exc[0] is not None:
            for process in self.processes():
                print(f"----- {process.name}\n{process.log()[-6000:]}", file=sys.stderr)

    def processes(self) -> Iterator[Process]:
        yield from self.engines.values()
        if self.router is not None:
            yield self.router

    def add_engine(self, name: str, role: str, *flags: str, env: dict[str, str] | None = None) -> Process:
        """Start an engine; `wait_ready` waits for it."""
        port, store_port, http_port = free_ports(3)
        argv = [
            sys.executable,
            "-m",
            "kvferry",
            "engine",
            self.model,
            "--role",
            role,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--store-port",
            str(store_port),
            "--http-port",
            str(http_port),
            "--threads",
            "1",
            "--served-model-name",
            "test",
            *self.engine_flags,
            *flags,
        ]
        process = Process(
            name, argv, http_port, self.directory / f"{name}.log", env={"OMP_WAIT_POLICY": "passive", **(env or {})}
        )
        process.start()
        self.engines[name] = process
        self.addresses[name] = f"127.0.0.1:{port}"
        return process

    def add_router(self, *flags: str, decode: list[str] | None = None, prefill: list[str] | None = None) -> Process:
        """Start the router over named engines (default: by the role in their name's prefix, p or d)."""
        decode = decode if decode is not None else [name for name in self.engines if not name.startswith("p")]
        prefill = prefill if prefill is not None else [name for name in self.engines if name.startswith("p")]
        port, metrics_port = free_ports(2)
        argv = [
            sys.executable,
            "-m",
            "kvferry",
            "router",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--metrics-port",
            str(metrics_port),
            "--decode",
            "static:" + ",".join(self.addresses[name] for name in decode),
        ]
        if prefill:
            argv += ["--prefill", "static:" + ",".join(self.addresses[name] for name in prefill)]
        self.router = Process("router", [*argv, *flags], metrics_port, self.directory / "router.log")
        self.router.start()
        self.url = f"http://127.0.0.1:{port}"
        return self.router

    def state(self) -> dict[str, Any]:
        """The router's /state."""
        assert self.router is not None
        status, body = get(f"http://127.0.0.1:{self.router.http_port}/state")
        return json.loads(body) if status == 200 else {}

    def usable(self) -> list[str]:
        """Names of the engines the router would use now."""
        by_address = {address: name for name, address in self.addresses.items()}
        engines = self.state().get("engines", [])
        return [by_address.get(engine["address"], engine["address"]) for engine in engines if engine.get("usable")]

    def wait_ready(self, names: list[str] | None = None, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the router can use all (named) engines."""
        wanted = set(names if names is not None else self.engines)

        def is_ready() -> bool:
            for process in self.processes():
                if process.name in (*wanted, "router") and not process.is_running:
                    raise AssertionError(f"{process.name} exited early:\n{process.log()[-3000:]}")
            return wanted <= set(self.usable())

        wait_for(is_ready, timeout_s=timeout_s, what=f"router uses {sorted(wanted)}")

    def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float = 120.0
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """POST JSON; (parsed answer, response headers in lower case). AssertionError on any status but 200."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.loads(response.read()), {key.lower(): value for key, value in response.headers.items()}
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} answered {error.code}: {error.read().decode()}") from error

    def complete(
        self, prompt: list[int] | str, max_tokens: int, **fields: Any
    ) -> tuple[list[list[int]], dict[str, str]]:
        """Token ids of every choice of a /v1/completions call (greedy unless told), and the headers."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        answer, headers = self.post("/v1/completions", body)
        return [choice["token_ids"] for choice in answer["choices"]], headers

    def stream(
        self, prompt: list[int], max_tokens: int, *, on_token: Callable[[int], None] | None = None, **fields: Any
    ) -> list[int]:
        """Token ids of one streamed completion; `on_token` sees how many have arrived. AssertionError on an error event."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **fields,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        ids: list[int] = []
        with urllib.request.urlopen(request, timeout=180.0) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
                if on_token is not None:
                    on_token(len(ids))
        return ids
