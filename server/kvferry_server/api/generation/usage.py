"""Token counts of a response: once per prompt, summed over outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry_server.settings import RouterSettings

from .protocol import GenerationFields
from .running import Running


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Which usage a stream shows: a last chunk with totals, and figures in every chunk."""

    in_last_chunk: bool
    in_every_chunk: bool


def usage_options(fields: GenerationFields, settings: RouterSettings) -> UsageOptions:
    """Return what a request's stream_options and the server's settings ask for."""
    if settings.enable_force_include_usage:
        return UsageOptions(True, True)
    options = fields.stream_options
    last = bool(options and options.include_usage)
    return UsageOptions(last, last and bool(options and options.continuous_usage_stats))


def count_usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """Return the plain figures, as chunks of a stream carry them."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "completion_tokens": num_output_tokens,
    }


def total_usage(running: Sequence[Running], settings: RouterSettings) -> dict[str, Any]:
    """Return the totals of a request; cached tokens are those of its last prompt."""
    usage = count_usage(sum(one.num_prompt_tokens for one in running), sum(one.num_output_tokens for one in running))
    details = None
    report = running[-1].report
    if settings.enable_prompt_tokens_details and report is not None:
        details = {"cached_tokens": report.cached_tokens, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}


def without_nulls(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a usage chunk, which leaves out what is null."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in usage.items()
        if value is not None
    }
