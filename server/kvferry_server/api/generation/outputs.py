"""Deltas gathered: whole outputs for responses that do not stream, and larger chunks for streams that want fewer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from kvferry_engine.wire.messages import TokenLogprobs

from .reader import Delta
from .running import Batch


@dataclass(slots=True)
class Output:
    """Everything one sequence produced."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def collect(batch: Batch, n: int) -> list[list[Output]]:
    """Return the outputs by prompt and sequence, once all have finished."""
    outputs = [[Output() for _ in range(n)] for _ in batch.running]
    async with contextlib.aclosing(batch.deltas()) as deltas:
        async for number, delta in deltas:
            outputs[number][delta.index].add(delta)
    return outputs


class Pacer:
    """Joins deltas of one choice until they hold enough tokens; the first and the last are never held up."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: Delta | None = None
        self._is_first = True

    def take(self, delta: Delta) -> Delta | None:
        """Return what to send now: `delta`, joined with what was held; None: later."""
        if self._interval == 1:
            return delta
        if self._held is not None:
            delta = _joined(self._held, delta)
        if self._is_first or delta.finish_reason is not None or len(delta.token_ids) >= self._interval:
            self._is_first, self._held = False, None
            return delta
        self._held = delta
        return None


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
    )
