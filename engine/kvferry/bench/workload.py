"""What a load generator sends: prompts of chosen lengths, and the moments at which requests start."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.http_client import HttpClient, HttpError

_POOL_TEXT = (
    "The ferry crosses the wide river every morning, carrying people, bread, letters and small machines from one bank "
    "to the other. When the water is high it waits; when the wind is fair it hurries. Nobody remembers who built it, "
    "yet everyone knows its bell, its green paint, and the old engine that never quite stops."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request: token ids (completions) or a text, and the number of tokens to ask for."""

    content: list[int] | str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths in tokens; `range_ratio` r draws each from [(1 - r) x, (1 + r) x]."""

    num_input: int
    num_output: int
    num_prefix: int = 0
    range_ratio: float = 0.0


async def random_prompts(
    client: HttpClient, model: str, count: int, lengths: RandomLengths, *, as_text: bool, draw: random.Random
) -> list[Prompt]:
    """Return prompts made of ordinary token ids of the served model, asked from its /tokenize.

    Every prompt starts with the same `num_prefix` ids; what follows differs, so that no prefix cache helps. With `as_text`
    the ids are turned to text by /detokenize; the server may then count slightly differently.
    """
    answer = await client.json("POST", "/tokenize", {"model": model, "prompt": _POOL_TEXT, "add_special_tokens": False})
    pool = sorted(set(answer["tokens"]))
    prefix = draw.choices(pool, k=lengths.num_prefix)
    prompts = []
    for _ in range(count):
        num_input = _drawn_length(lengths.num_input, lengths.range_ratio, draw)
        ids = prefix + draw.choices(pool, k=num_input)
        content: list[int] | str = ids
        if as_text:
            content = (await client.json("POST", "/detokenize", {"model": model, "tokens": ids}))["prompt"]
        num_output = _drawn_length(lengths.num_output, lengths.range_ratio, draw)
        prompts.append(Prompt(content=content, num_prompt_tokens=len(ids), num_output_tokens=num_output))
    return prompts


def file_prompts(filename: Path, count: int, num_output: int) -> list[Prompt]:
    """Return prompts of a file with one JSON object a line: `prompt`, and optionally `output_tokens`.

    The file is repeated when it has fewer lines than `count`. Raises HttpError for what cannot be used.
    """
    try:
        rows = [json.loads(line) for line in filename.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [
            Prompt(
                content=row["prompt"], num_prompt_tokens=0, num_output_tokens=int(row.get("output_tokens", num_output))
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HttpError(f"{filename} is not a file of JSON lines with a prompt each: {error}") from error
    if not prompts:
        raise HttpError(f"{filename} has no prompts")
    return [prompts[index % len(prompts)] for index in range(count)]


def request_body(prompt: Prompt, model: str, *, chat: bool, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the streamed request for a prompt; usage comes with the last event."""
    content = {"messages": [{"role": "user", "content": prompt.content}]} if chat else {"prompt": prompt.content}
    limit = "max_completion_tokens" if chat else "max_tokens"
    return {
        "model": model,
        **content,
        limit: prompt.num_output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


def start_times_s(count: int, rate_per_s: float, burstiness: float, draw: random.Random) -> Iterator[float]:
    """Yield when each request starts, in seconds: gamma-distributed gaps (1: Poisson; greater: more even)."""
    time_s = 0.0
    for _ in range(count):
        yield time_s
        if not math.isinf(rate_per_s):
            time_s += draw.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _drawn_length(length: int, ratio: float, draw: random.Random) -> int:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, draw.randint(low, high))
