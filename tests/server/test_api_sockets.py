"""The app behind a real uvicorn: the official SDK, clients that leave, large bodies, keep-alive comments."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from kvferry_server import streaming
from server.kit_gateway import SCRIPT, FakeGateway, make_app, serving, wait_until

HI: list[Any] = [{"role": "user", "content": "hi"}]


def sdk(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_the_openai_sdk_reads_everything() -> None:
    with serving(make_app(FakeGateway())) as url, sdk(url) as client:
        models = client.models.list()
        card = client.models.retrieve("tiny")
        answer = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2, n=2)
        text = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=True)

    assert [model.id for model in models.data] == ["tiny", "tiny-alias"]
    assert card.id == "tiny"
    assert [choice.message.content for choice in answer.choices] == [SCRIPT, SCRIPT]
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert [choice.text for choice in text.choices] == [f"a{SCRIPT}", f"b{SCRIPT}"]


def test_the_openai_sdk_reads_streams() -> None:
    with serving(make_app(FakeGateway())) as url, sdk(url) as client:
        chat = list(
            client.chat.completions.create(
                model="tiny", messages=HI, stream=True, logprobs=True, stream_options={"include_usage": True}
            )
        )
        text = list(client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=100))

    assert "".join(c.delta.content or "" for chunk in chat for c in chunk.choices) == SCRIPT
    assert chat[-1].usage is not None
    assert "".join(chunk.choices[0].text for chunk in text) == SCRIPT


def test_the_openai_sdk_raises_its_own_errors() -> None:
    with serving(make_app(FakeGateway(), api_key=("right",))) as url:
        with sdk(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with sdk(url, "right") as client:
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="other", messages=HI)
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=HI, temperature=9, stream=True)
    assert caught.value.param == "temperature"


def test_the_openai_sdk_raises_when_a_stream_breaks() -> None:
    with serving(make_app(FakeGateway(fail_after=2))) as url, sdk(url) as client, pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_a_stream_frees_its_generation(path: str) -> None:
    gateway = FakeGateway(endless=True, gate=asyncio.Event())
    app = make_app(gateway)
    body = {"messages": HI, "prompt": "a", "stream": True, "max_tokens": 100}

    with serving(app) as url:
        with httpx.stream("POST", url + path, json=body, timeout=10) as response:
            lines = response.iter_lines()
            next(lines)
            assert gateway.num_open == 1
        wait_until(lambda: gateway.num_open == 0)
        metrics = httpx.get(f"{url}/metrics").text

    assert "kvferry_client_disconnects_total 1.0" in metrics
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in metrics


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_its_generation(prompt: Any, streamed: bool) -> None:
    class Silent(FakeGateway):
        async def submit(self, request: Any) -> Any:
            generation = await super().submit(request)
            silence = asyncio.Event()

            async def events() -> Any:
                await silence.wait()
                yield None

            generation.events = events  # type: ignore[method-assign]
            return generation

    gateway = Silent()
    with serving(make_app(gateway)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "stream": streamed}, timeout=0.3)
        wait_until(lambda: len(gateway.generations) > 0 and gateway.num_open == 0)


def test_a_client_that_leaves_while_engines_are_asked_cancels_the_asking() -> None:
    cancelled = threading.Event()

    class Slow(FakeGateway):
        async def submit(self, request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    with serving(make_app(Slow())) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=0.3)
        assert cancelled.wait(10)


def test_a_large_body_is_refused_before_it_is_read() -> None:
    with serving(make_app(FakeGateway())) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 104857600\r\n\r\n" + b"x" * 1000
            )
            answer = connection.recv(4096)
        again = httpx.get(f"{url}/health")

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert again.status_code == 200


def test_a_hundred_megabytes_are_refused_quickly() -> None:
    body = b'{"prompt": "' + b"x" * (100 << 20) + b'"}'
    with serving(make_app(FakeGateway())) as url:
        started = time.monotonic()
        try:
            status = httpx.post(
                f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=20
            ).status_code
        except (httpx.WriteError, httpx.ReadError):
            # The server closed the connection while the client was still sending: refused, too.
            status = 413
        elapsed = time.monotonic() - started

    assert status == 413
    assert elapsed < 5


def test_a_chunked_body_is_cut_off_where_it_gets_too_large() -> None:
    def endless() -> Any:
        for _ in range(200):
            yield b"x" * 10_000

    with serving(make_app(FakeGateway(), max_body_bytes=100_000)) as url:
        try:
            response = httpx.post(
                f"{url}/v1/completions", content=endless(), headers={"content-type": "application/json"}, timeout=10
            )
            status = response.status_code
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            status = 413

    assert status == 413


def test_two_with_the_same_id_at_once_do_not_mix() -> None:
    gateway = FakeGateway()
    with serving(make_app(gateway)) as url:

        def ask(n: int) -> httpx.Response:
            body = {"prompt": [n], "max_tokens": 3, "return_token_ids": True}
            return httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "same"}, timeout=10)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(1, 17)))

    assert [answer.json()["choices"][0]["prompt_token_ids"] for answer in answers] == [[n] for n in range(1, 17)]
    assert len({request.rid for request in gateway.requests}) == 16


def test_idle_streams_send_comments_when_asked_to() -> None:
    gate = asyncio.Event()
    gateway = FakeGateway(gate=gate)
    app = make_app(gateway, sse_keep_alive_interval=0.05)
    body = {"prompt": "a", "stream": True, "max_tokens": 3}

    with serving(app) as url, httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(5)]
        gate.set()
        rest = list(lines)

    assert seen[0].startswith("data: {")
    assert ": keep-alive" in seen[1:]
    assert rest[-2:] == ["data: [DONE]", ""]


class Gated(FakeGateway):
    """No event at all before `opened`, then a failure or the script."""

    opened: asyncio.Event

    async def submit(self, request: Any) -> Any:
        generation = await super().submit(request)
        events = generation.events

        async def gated() -> Any:
            await self.opened.wait()
            async for event in events():
                yield event

        generation.events = gated  # type: ignore[method-assign]
        return generation


@pytest.mark.parametrize("fail_after", [None, 0])
def test_a_stream_whose_first_token_is_late_starts_anyway(
    monkeypatch: pytest.MonkeyPatch, fail_after: int | None
) -> None:
    monkeypatch.setattr(streaming, "FIRST_FRAME_WAIT_S", 0.05)
    gateway = Gated(fail_after=fail_after)
    gateway.opened = asyncio.Event()
    body = {"prompt": "a", "stream": True, "max_tokens": 100}

    with (
        serving(make_app(gateway)) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response,
    ):
        early = (response.status_code, dict(response.headers))
        gateway.opened.set()
        text = response.read().decode()

    assert early[0] == 200
    assert "x-kvferry-prefill" not in early[1]
    assert early[1]["x-kvferry-decode"] == "decode-0"
    assert text.endswith("data: [DONE]\n\n")
    assert ('"code":500' in text) == (fail_after is not None)
    assert gateway.num_open == 0


def test_load_counts_requests_that_are_being_answered() -> None:
    gateway = FakeGateway(gate=asyncio.Event(), endless=True)
    with serving(make_app(gateway)) as url:
        body = {"prompt": "a", "stream": True, "max_tokens": 100}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
            lines = response.iter_lines()
            next(lines)
            during = httpx.get(f"{url}/load").json()
        wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 0})

    assert during == {"server_load": 1}
