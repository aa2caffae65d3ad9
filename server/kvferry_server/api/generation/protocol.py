"""The body fields that every OpenAI-style generation request shares: sampling, stopping, output form, scheduling.

Extra keys are ignored, numbers are coerced the lax way, and what a field means is decided in `sampling` and `features`.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvferry_server.api.checks import invalid

logger = logging.getLogger(__name__)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


def number_only(name: str) -> BeforeValidator:
    """Return a validator that refuses numeric strings, which other numeric fields accept."""

    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, (int, float)):
            raise invalid(f"`{name}` must be a number.", param=name, value=value)
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    """Which usage figures a stream carries."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class RepetitionDetectionOptions(BaseModel):
    """Stop when the output ends with repeats of a short pattern."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GenerationFields(BaseModel):
    """Fields of completions and chat completions alike."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: Annotated[int | None, number_only("prompt_logprobs")] = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    echo: bool = False
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    repetition_detection: RepetitionDetectionOptions | None = None
    priority: Int64 = 0
    request_id: str | None = Field(default="", validate_default=False)
    session_id: str | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    user: str | None = None

    # Features that are refused when a request uses them: see `features`.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    thinking_token_budget: Any = None
    watermarking: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


RETIRED_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
)


def warn_about_retired(body: dict[str, Any]) -> None:
    """Log once per request which retired fields it carries; they are ignored, as clients of long standing expect."""
    found = [name for name in RETIRED_FIELDS if name in body]
    if found:
        logger.warning("retired request fields ignored fields=%s", ",".join(found))
