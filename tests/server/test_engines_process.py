"""The router process: ports, /state, /ready, metrics, signals, and one stream through everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry_engine.wire.sockets import derive_keys
from kvferry_server.main import read_wire_keys
from server.kit_engine import FakeEngine, tokens_of, until

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from kvferry_server.main import run
from kvferry_server.settings import RouterSettings

sys.exit(run(RouterSettings(**json.loads(sys.argv[1]))))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Router:
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient
    state_url: str

    async def state(self) -> dict[str, Any]:
        return dict((await self.http.get(f"{self.state_url}/state")).json())

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 20.0)


async def launch(**settings: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        json.dumps({"host": "127.0.0.1", **settings}),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@asynccontextmanager
async def router(*engines: FakeEngine, **settings: Any) -> AsyncIterator[Router]:
    for engine in engines:
        await engine.start()
    port, metrics_port = free_port(), free_port()
    settings.setdefault("decode", "static:" + ",".join(engine.address for engine in engines))
    settings.setdefault("shutdown_delay", 0.0)
    process = await launch(port=port, metrics_port=metrics_port, **settings)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http:
        handle = Router(process, http, f"http://127.0.0.1:{metrics_port}")
        try:
            async with asyncio.timeout(40):
                while True:
                    try:
                        if (await handle.state())["usable"]["both"] == len(engines):
                            break
                    except httpx.TransportError:
                        assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield handle
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            for engine in engines:
                await engine.close()


def streaming(handle: Router, max_tokens: int) -> Any:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": max_tokens, "seed": 9, "stream": True}
    return handle.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})


async def read_ids(response: httpx.Response) -> list[int]:
    ids: list[int] = []
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                ids += choice.get("token_ids") or []
    return ids


async def test_the_router_answers_state_ready_and_metrics_beside_the_api() -> None:
    async with router(FakeEngine("a"), FakeEngine("b")) as handle:
        state = await handle.state()
        assert {(e["name"], e["state"], e["usable"], e["reason"]) for e in state["engines"]} == {
            ("a", "live", True, ""),
            ("b", "live", True, ""),
        }
        assert (state["ready"], state["draining"], state["model"], state["in_flight"]) == (True, False, "tiny", 0)
        assert (await handle.http.get(f"{handle.state_url}/ready")).status_code == 200
        assert (await handle.http.get(f"{handle.state_url}/other")).status_code == 404
        assert (await handle.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        for path in (f"{handle.state_url}/metrics", "/metrics"):
            text = (await handle.http.get(path)).text
            for name in ("vllm:num_requests_running", "kvferry_request_moves_total", 'kvferry_engine_up{engine="a"'):
                assert name in text
        assert await handle.end(signal.SIGINT) == 130


async def test_a_stream_survives_the_death_of_its_engine_and_the_end_of_the_router() -> None:
    engines = [FakeEngine("a", step_s=0.01), FakeEngine("b", step_s=0.01)]
    async with router(*engines, shutdown_delay=1.0) as handle, streaming(handle, 300) as response:
        assert response.status_code == 200
        reading = asyncio.create_task(read_ids(response))
        await until(lambda: any(engine.open_sequences for engine in engines))
        here = next(engine for engine in engines if engine.open_sequences)
        await until(lambda: len(here.open_sequences[0].emitted) > 20)
        await here.crash()
        await until(lambda: any(engine.open_sequences for engine in engines if engine is not here))
        handle.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient() as fresh:
            late = await fresh.get(f"{handle.http.base_url}/v1/models")
            ready = await fresh.get(f"{handle.state_url}/ready")
        assert (late.status_code, late.headers["connection"], ready.status_code) == (200, "close", 200)
        assert await reading == tokens_of(9, 300)
        assert await asyncio.wait_for(handle.process.wait(), 20.0) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode": "static:127.0.0.1:1", "port": "taken"}, "cannot listen on 127.0.0.1:"),
        ({}, "no engines: give --decode"),
        ({"decode": "consul:x:1"}, "is no engine source"),
        ({"decode": "static:127.0.0.1:1", "wire_secret_file": "/nonexistent"}, "cannot read the wire secret"),
        ({"decode": "static:127.0.0.1:1", "ssl_certfile": "/nonexistent"}, "cannot use the TLS files"),
    ],
)
async def test_what_cannot_start_says_why_in_one_line(settings: dict[str, Any], message: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        changes = {"port": taken} if settings.get("port") == "taken" else {"port": free_port()}
        process = await launch(**{"metrics_port": free_port(), "log_level": "warning", **settings, **changes})
        _, stderr = await process.communicate()
    assert process.returncode == 1
    lines = stderr.decode().splitlines()
    assert len(lines) == 1 and message in lines[0]


async def test_a_secret_on_disk_becomes_keys(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("current secret 16 bytes\nprevious secret 16 bytes\n")
    current, previous = (derive_keys(text.encode()) for text in ("current secret 16 bytes", "previous secret 16 bytes"))
    assert read_wire_keys(str(file)) == [current, previous]
