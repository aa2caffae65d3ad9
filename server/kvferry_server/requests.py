"""What the HTTP dialects hand to the routing layer and what they get back; the seam between text and engines.

A dialect (api/<family>) builds an `EngineRequest` and reads `TokenEvent`s from the `Generation` that a `Gateway` returns.
It never sees engines, connections or retries. `routing.dispatcher` is the real gateway; tests use a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvferry_engine.wire.assets import AssetBundle
from kvferry_engine.wire.messages import Finish, GrammarSpec, ModelInfo, PromptReport, Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt and its n sequences; `seeds[i]` is the 64-bit seed of sequence i (always drawn before this point)."""

    rid: str
    prompt_ids: list[int]
    sampling: Sampling
    seeds: list[int]
    grammar: GrammarSpec | None = None
    lora_digest: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    session_id: str = ""
    traceparent: str = ""
    assets_digest: str = ""
    """`ModelView.info.assets_digest` that the prompt was rendered with; empty: the current model's."""


@dataclass(slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one sequence. `logprobs` is parallel to `token_ids` when asked for; `report` comes with the first event."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    report: PromptReport | None = None
    finish: Finish | None = None


class Generation(Protocol):
    """A running request.

    Iterate its events until every sequence has a `finish`; always `aclose` it (aborts what still runs).
    """

    @property
    def decode_engine(self) -> str: ...

    @property
    def prefill_engine(self) -> str: ...

    def events(self) -> AsyncIterator[TokenEvent]: ...

    async def stop(self, index: int) -> None:
        """End one sequence early (a stop string was found); no further events of it are delivered."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """The model as HTTP sees it: from the engines' HELLO and the asset bundle."""

    info: ModelInfo
    assets: AssetBundle


class Gateway(Protocol):
    """Access to the engines."""

    def model(self) -> ModelView | None:
        """The served model, or None before the first engine is usable (HTTP answers 503)."""

    async def submit(self, request: EngineRequest) -> Generation:
        """Start a request and return once an engine accepted it.

        Raises errors.ApiError subclasses: rejected by the engine (400/501), queue limits (429/503 with retry_after_s), no
        usable engine (503).
        """
        ...
