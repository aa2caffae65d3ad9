"""What the Python SDK returns; vLLM's field names, so that scripts port by changing their import."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate at one position; `rank` is 1-based in the whole vocabulary."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the n outputs. `finish_reason` is None while it runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One prompt with its outputs so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
