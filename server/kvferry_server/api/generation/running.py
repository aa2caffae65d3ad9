"""The running generations of one HTTP request: their deltas in one stream, their timing, and one way to let go of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from kvferry_engine.wire.messages import FinishReason, PromptReport, TokenLogprobs
from kvferry_server.errors import ApiError, EngineFailedError
from kvferry_server.metrics import RequestMetrics
from kvferry_server.requests import Generation, TokenEvent

from .reader import Delta, SequenceReader

QUEUE_LIMIT = 256
"""Deltas buffered between the generations of one request and a slow client."""


class Running:
    """One accepted prompt with its n sequences. Iterate `deltas` once; always `aclose`."""

    def __init__(
        self,
        generation: Generation,
        readers: Sequence[SequenceReader],
        *,
        num_prompt_tokens: int,
        wants_prompt_logprobs: bool,
        metrics: RequestMetrics,
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.report: PromptReport | None = None
        self._generation = generation
        self._readers = readers
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._metrics = metrics
        self._early: list[TokenEvent] = []
        self._closed = False
        self._failed = False

    @property
    def decode_engine(self) -> str:
        return self._generation.decode_engine

    @property
    def prefill_engine(self) -> str:
        return self._generation.prefill_engine

    @property
    def num_output_tokens(self) -> int:
        return sum(reader.num_tokens for reader in self._readers)

    def num_tokens(self, index: int) -> int:
        """Return how many tokens sequence `index` has so far."""
        return self._readers[index].num_tokens

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield what the sequences add until all have finished.

        Prompt log-probs, when asked for, are known before the first delta. Raises EngineFailedError when a sequence fails.
        """
        try:
            async for event in self._generation.events():
                for ready in self._in_order(event):
                    if not self._readers[ready.index].finished:
                        yield await self._read(ready)
                if all(reader.finished for reader in self._readers):
                    return
            raise EngineFailedError("The engine ended the request before it was complete.")
        except ApiError:
            self._failed = True
            raise

    def _in_order(self, event: TokenEvent) -> list[TokenEvent]:
        """Take the prompt's facts from an event; return the events to read now: none before prompt log-probs are known."""
        if event.report is not None and self.report is None:
            self.report = event.report
            self._metrics.prompt_filled(event.report)
        if event.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = event.prompt_logprobs
        if not self._wants_prompt_logprobs:
            return [event]
        self._early.append(event)
        if self.prompt_logprobs is None and event.finish is None:
            return []
        ready, self._early = self._early, []
        return ready

    async def _read(self, event: TokenEvent) -> Delta:
        if event.finish is not None and event.finish.reason is FinishReason.ERROR:
            raise EngineFailedError("The engine failed while it was generating.")
        reader = self._readers[event.index]
        delta = reader.read(event)
        if delta.token_ids:
            self._metrics.tokens(event.index, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._metrics.finished(event.index, delta.finish_reason)
            if event.finish is None:
                await self._generation.stop(event.index)
        return delta

    async def aclose(self) -> None:
        """Let the engine forget the request; sequences that still run count as aborted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._metrics.closed(failed=self._failed)
        await self._generation.aclose()


class Batch:
    """The running prompts of one HTTP request, in the order of the prompts."""

    def __init__(self, running: Sequence[Running]) -> None:
        self.running = running

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (prompt number, delta) as they come; prompts interleave freely."""
        if len(self.running) == 1:
            async with contextlib.aclosing(self.running[0].deltas()) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(QUEUE_LIMIT)
        tasks = [asyncio.ensure_future(_pump(number, one, queue)) for number, one in enumerate(self.running)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def headers(self) -> dict[str, str]:
        """Return the response headers that name the engines."""
        named = {
            "x-kvferry-decode": dict.fromkeys(one.decode_engine for one in self.running),
            "x-kvferry-prefill": dict.fromkeys(one.prefill_engine for one in self.running),
        }
        joined = {header: ",".join(filter(None, engines)) for header, engines in named.items()}
        return {header: value for header, value in joined.items() if value}

    async def aclose(self) -> None:
        await asyncio.gather(*(one.aclose() for one in self.running))


async def _pump(number: int, running: Running, queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]) -> None:
    try:
        async with contextlib.aclosing(running.deltas()) as deltas:
            async for delta in deltas:
                await queue.put((number, delta))
    except Exception as error:  # noqa: BLE001 - travels to the consumer, which raises it
        await queue.put(error)
    else:
        await queue.put(None)


async def start_all(starts: Sequence[Callable[[], Awaitable[Running]]]) -> Batch:
    """Start every prompt of a request; when one is refused, the others are let go of and its error is raised."""
    if len(starts) == 1:
        return Batch([await starts[0]()])
    tasks = [asyncio.ensure_future(start()) for start in starts]
    try:
        return Batch(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Running):
                await result.aclose()
        raise
