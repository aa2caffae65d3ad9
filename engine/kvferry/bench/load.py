"""The load generator: starts requests at their times, never more at once than allowed, and takes down when tokens come.

Open loop: a request that cannot start because too many run waits, and its waiting is not part of its own times, as in
vLLM's benchmark, whose numbers these are meant to stand beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.workload import Prompt
from kvferry.http_client import HttpClient, HttpError


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one request experienced. Times in seconds; `gaps_s` lie between consecutive events with text."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float | None = None
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error and self.first_token_s is not None

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.num_output_tokens - 1)


async def send(client: HttpClient, path: str, body: dict[str, Any], prompt: Prompt) -> Outcome:
    """Send one streamed request and measure it; errors become part of the outcome."""
    outcome = Outcome(num_prompt_tokens=prompt.num_prompt_tokens, started_s=time.perf_counter())
    last_s = outcome.started_s
    parts: list[str] = []
    num_events = 0
    try:
        async with client.events(path, body) as (_, events):
            async for event in events:
                now_s = time.perf_counter()
                if usage := event.get("usage"):
                    outcome.num_prompt_tokens = usage["prompt_tokens"]
                    outcome.num_output_tokens = usage.get("completion_tokens") or 0
                text = _text(event)
                if text is None:
                    continue
                num_events += 1
                parts.append(text)
                if outcome.first_token_s is None:
                    outcome.first_token_s = now_s - outcome.started_s
                else:
                    outcome.gaps_s.append(now_s - last_s)
                last_s = now_s
    except HttpError as error:
        outcome.error = str(error)
    outcome.latency_s = last_s - outcome.started_s
    outcome.num_output_tokens = outcome.num_output_tokens or num_events
    outcome.text = "".join(parts)
    if outcome.first_token_s is None and not outcome.error:
        outcome.error = "the answer had no text"
    return outcome


async def run_load(
    client: HttpClient,
    path: str,
    work: Sequence[tuple[float, Prompt, dict[str, Any]]],
    *,
    max_concurrency: int | None,
    on_done: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Send requests (start time in seconds, prompt, body) and return their outcomes in order, and the duration in seconds."""
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    began_s = time.perf_counter()

    async def one(start_s: float, prompt: Prompt, body: dict[str, Any]) -> Outcome:
        await asyncio.sleep(max(0.0, start_s - (time.perf_counter() - began_s)))
        async with _held(limit):
            outcome = await send(client, path, body, prompt)
        on_done(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*item)) for item in work]
    return [task.result() for task in tasks], time.perf_counter() - began_s


async def wait_until_ready(client: HttpClient, path: str, body: dict[str, Any], timeout_s: float) -> None:
    """Send one request again and again until it succeeds. Raises HttpError with the last cause after `timeout_s`."""
    deadline_s = time.perf_counter() + timeout_s
    probe = Prompt(content="", num_prompt_tokens=0, num_output_tokens=1)
    while True:
        outcome = await send(client, path, body, probe)
        if outcome.succeeded:
            return
        if time.perf_counter() >= deadline_s:
            raise HttpError(f"the server does not answer a first request: {outcome.error}")
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def _held(limit: asyncio.Semaphore | None) -> AsyncIterator[None]:
    if limit is None:
        yield
        return
    async with limit:
        yield


def _text(event: dict[str, Any]) -> str | None:
    """Return the text of an event that carries a token, None for one that does not (role, usage)."""
    for choice in event.get("choices", ()):
        if "delta" in choice:
            delta = choice["delta"]
            text = delta.get("content") or delta.get("reasoning_content")
            return str(text) if text else None
        return str(choice.get("text", ""))
    return None
