"""A gateway that generates scripted text with a small real tokenizer, and ways to call the app in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvferry_engine.wire.assets import AssetBundle, encode_bundle
from kvferry_engine.wire.messages import Finish, FinishReason, KVLayout, ModelInfo, PromptReport, TokenLogprobs
from kvferry_engine.wire.packing import pack_ids
from kvferry_server.app import create_app
from kvferry_server.errors import ApiError
from kvferry_server.metrics import RouterMetrics
from kvferry_server.requests import EngineRequest, ModelView, TokenEvent
from kvferry_server.settings import RouterSettings

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "The ferry carries keys and values across the water.",
    "A stop string may lie across the borders of several tokens.",
    "Größe, naïve, 日本語, emoji 🚀🎉 and more text for merges.",
    "Hello world, how are you today? I am fine, thank you.",
]
SCRIPT = "The ferry carries 🚀 keys and values."


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with 400 entries and three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    return tokenizer


def token_id(text: str) -> int:
    found = tiny_tokenizer().token_to_id(text)
    assert found is not None
    return int(found)


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(ids: list[int]) -> str:
    return str(tiny_tokenizer().decode(ids, skip_special_tokens=True))


def make_bundle(**changes: Any) -> AssetBundle:
    fields: dict[str, Any] = {
        "tokenizer_json": tiny_tokenizer().to_str().encode(),
        "chat_templates": {"default": CHATML},
        "special_tokens": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        "eos_token_id": token_id("<|im_end|>"),
        "extra_eos_token_ids": [token_id("<|endoftext|>")],
        "tasks": ["generate"],
        "max_model_len": 128,
    }
    return AssetBundle(**{**fields, **changes})


def make_view(*, bundle: AssetBundle | None = None, **changes: Any) -> ModelView:
    assets = bundle or make_bundle()
    digest, data = encode_bundle(assets)
    fields: dict[str, Any] = {
        "names": ["tiny", "tiny-alias"],
        "root": "/models/tiny",
        "max_model_len": 128,
        "vocab_size": tiny_tokenizer().get_vocab_size(),
        "tasks": ["generate"],
        "dtype": "float32",
        "layout": KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=32, dtype="float32"),
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "tensor_parallel": 1,
        "weights_id": "w",
        "pair_hash": "p",
        "output_hash": "0123456789abcdef",
        "assets_digest": digest,
        "assets_bytes": len(data),
    }
    return ModelView(info=ModelInfo(**{**fields, **changes}), assets=assets)


def make_logprobs(token: int, depth: int, *, vocab_size: int = 400) -> TokenLogprobs:
    """Log-probs of `token` and `depth` alternatives: the token has rank 1, the neighbours follow."""
    others = [(token + n) % vocab_size for n in range(depth)]
    ids = [token, *others]
    return TokenLogprobs(
        ids=pack_ids(ids), values=[-0.5, *(-0.5 - n for n in range(depth))], ranks=pack_ids([1, *range(1, depth + 1)])
    )


@dataclass
class FakeGateway:
    """Implements `requests.Gateway`. `script` gives the output ids of a sequence; EOS follows unless `endless`."""

    view: ModelView | None = field(default_factory=make_view)
    script: Callable[[EngineRequest, int], list[int]] = lambda request, index: ids_of(SCRIPT)
    refusal: ApiError | None = None
    endless: bool = False
    fail_after: int | None = None
    """Sequences fail with reason error after this many tokens."""
    raise_after: ApiError | None = None
    """Raised by the events after the first token."""
    tokens_per_event: int = 1
    gate: asyncio.Event | None = None
    """Waited for before every event but the first."""
    submit_gate: asyncio.Event | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)

    def model(self) -> ModelView | None:
        return self.view

    async def submit(self, request: EngineRequest) -> FakeGeneration:
        self.requests.append(request)
        if self.submit_gate is not None:
            await self.submit_gate.wait()
        if self.refusal is not None:
            raise self.refusal
        generation = FakeGeneration(self, request)
        self.generations.append(generation)
        return generation

    @property
    def num_open(self) -> int:
        return sum(not generation.is_closed for generation in self.generations)


class FakeGeneration:
    """Implements `requests.Generation`."""

    decode_engine = "decode-0"

    def __init__(self, gateway: FakeGateway, request: EngineRequest) -> None:
        self._gateway = gateway
        self.request = request
        self.prefill_engine = ""
        self.stopped: list[int] = []
        self.is_closed = False
        self.num_sent = 0

    async def events(self) -> AsyncIterator[TokenEvent]:
        gateway, request = self._gateway, self.request
        n = len(request.seeds)
        iterators = {index: self._sequence(index) for index in range(n)}
        is_first = True
        while iterators:
            for index in list(iterators):
                if index in self.stopped:
                    del iterators[index]
                    continue
                if not is_first and gateway.gate is not None:
                    await gateway.gate.wait()
                await asyncio.sleep(0)
                if gateway.raise_after is not None and not is_first:
                    raise gateway.raise_after
                event = next(iterators[index])
                if is_first:
                    is_first = False
                    self.prefill_engine = "prefill-0"
                    event.report = PromptReport(
                        num_prompt_tokens=len(request.prompt_ids),
                        cached_tokens=min(32, len(request.prompt_ids) - 1),
                        local_reason="short",
                    )
                    if request.sampling.prompt_logprobs is not None:
                        depth = max(0, request.sampling.prompt_logprobs)
                        event.prompt_logprobs = [
                            None,
                            *(make_logprobs(token, depth) for token in request.prompt_ids[1:]),
                        ]
                self.num_sent += 1
                if event.finish is not None:
                    del iterators[index]
                yield event

    def _sequence(self, index: int) -> Iterator[TokenEvent]:
        gateway, sampling = self._gateway, self.request.sampling
        ids = gateway.script(self.request, index)
        if not gateway.endless:
            ids = [*ids, *sampling.eos_token_ids[:1]]
        ids = (ids * (1 + sampling.max_tokens // max(1, len(ids))))[: sampling.max_tokens]
        pending: list[int] = []
        for position, token in enumerate(ids):
            pending.append(token)
            finish = self._finish(token, position + 1)
            if finish is not None or len(pending) >= gateway.tokens_per_event:
                yield self._event(index, pending, finish)
                pending = []
            if finish is not None:
                return

    def _finish(self, token: int, num_tokens: int) -> Finish | None:
        sampling = self.request.sampling
        if self._gateway.fail_after is not None and num_tokens > self._gateway.fail_after:
            return Finish(reason=FinishReason.ERROR, message="broken")
        if token in sampling.eos_token_ids and num_tokens > sampling.min_tokens:
            return Finish(reason=FinishReason.STOP)
        if token in sampling.stop_token_ids and num_tokens > sampling.min_tokens:
            return Finish(reason=FinishReason.STOP, stop_reason=token)
        if num_tokens >= sampling.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def _event(self, index: int, ids: list[int], finish: Finish | None) -> TokenEvent:
        depth = self.request.sampling.logprobs
        logprobs = None if depth is None else [make_logprobs(token, max(0, depth)) for token in ids]
        return TokenEvent(index=index, token_ids=list(ids), logprobs=logprobs, finish=finish)

    async def stop(self, index: int) -> None:
        self.stopped.append(index)

    async def aclose(self) -> None:
        self.is_closed = True


def make_app(gateway: FakeGateway, **settings: Any) -> FastAPI:
    return create_app(RouterSettings(**settings), gateway, metrics=RouterMetrics())


@contextlib.asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Call the app in this process, without a socket."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def call(
    gateway: FakeGateway, path: str, body: Any, *, headers: dict[str, str] | None = None, **settings: Any
) -> httpx.Response:
    """POST one JSON body to a fresh app in front of `gateway`."""
    async with client_of(make_app(gateway, **settings)) as client:
        return await client.post(path, json=body, headers=headers or {})


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON chunks of a finished stream; checks media type and the last frame."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2] if not frame.startswith(":")]


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve the app with uvicorn on a free port, in a thread; yields the base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something another thread does. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)
