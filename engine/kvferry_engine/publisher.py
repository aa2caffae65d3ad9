"""Turns what retired steps changed into one STEP message per owner, and remembers sequences so that a router can resume a stream.

Finished sequences stay answerable for `RECENT_S`, within a bound on tokens; the tokens are the sequence's own array.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.scheduler.plan import SequenceUpdate
from kvferry_engine.wire import messages as wire

RECENT_S = 10.0
RECENT_TOKENS = 4_000_000


@dataclass(slots=True)
class _Columns:
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: dict[int, wire.Finish] = field(default_factory=dict)
    logprobs: dict[int, list[wire.TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[wire.TokenLogprobs | None]] = field(default_factory=dict)
    reports: dict[int, wire.PromptReport] = field(default_factory=dict)


def _column(values: list[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


class Publisher:
    """Collects updates of one loop turn and flushes them by origin.

    `send(origin, step)` delivers; `report(sequence)` makes the prompt report that travels with a sequence's first token.
    """

    def __init__(
        self, *, send: Callable[[str, wire.Step], None], report: Callable[[Sequence], wire.PromptReport]
    ) -> None:
        self._send = send
        self._report = report
        self._pending: dict[str, _Columns] = {}
        self._prompt_logprobs: dict[int, list[wire.TokenLogprobs | None]] = {}
        self._reported: set[int] = set()
        self._recent: OrderedDict[int, tuple[float, Sequence]] = OrderedDict()
        self._recent_tokens = 0

    def add(self, updates: list[SequenceUpdate], now: float) -> None:
        """Take the updates of one retired step (or abort); PREFILL sequences have no reader and are skipped."""
        for update in updates:
            sequence = update.sequence
            if sequence.purpose is Purpose.PREFILL:
                continue
            handle = sequence.handle
            if update.prompt_logprobs:
                self._prompt_logprobs.setdefault(handle, [None]).extend(update.prompt_logprobs)
            if not update.token_ids and update.finish is None:
                continue
            columns = self._pending.setdefault(sequence.origin, _Columns())
            columns.slots.append(handle)
            columns.counts.append(len(update.token_ids))
            columns.offsets.append(update.offset)
            columns.token_ids.extend(update.token_ids)
            if update.logprobs:
                columns.logprobs[handle] = update.logprobs
            if handle in self._prompt_logprobs:
                columns.prompt_logprobs[handle] = self._prompt_logprobs.pop(handle)
            if handle not in self._reported:
                self._reported.add(handle)
                columns.reports[handle] = self._report(sequence)
            if update.finish is not None:
                columns.finished[handle] = update.finish
                self._remember(sequence, now)

    def flush(self, load: wire.Load) -> None:
        """Send one STEP per origin with news."""
        for origin, columns in self._pending.items():
            self._send(
                origin,
                wire.Step(
                    slots=_column(columns.slots),
                    counts=_column(columns.counts),
                    offsets=_column(columns.offsets),
                    token_ids=_column(columns.token_ids),
                    finished=columns.finished,
                    logprobs=columns.logprobs,
                    prompt_logprobs=columns.prompt_logprobs,
                    reports=columns.reports,
                    load=load,
                ),
            )
        self._pending.clear()

    def forget(self, handle: int) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._reported.discard(handle)
        self._prompt_logprobs.pop(handle, None)

    def forget_origin(self, origin: str) -> None:
        """Drop unsent columns of a reader that is gone."""
        self._pending.pop(origin, None)

    def recent(self, rid: str, index: int) -> Sequence | None:
        """A sequence that finished within `RECENT_S`."""
        for _, sequence in reversed(self._recent.values()):
            if sequence.rid == rid and sequence.index == index:
                return sequence
        return None

    def expire(self, now: float) -> None:
        """Forget finished sequences that are too old or too many."""
        while self._recent:
            handle, (since, sequence) = next(iter(self._recent.items()))
            if now - since <= RECENT_S and self._recent_tokens <= RECENT_TOKENS:
                return
            del self._recent[handle]
            self._recent_tokens -= sequence.num_tokens

    def _remember(self, sequence: Sequence, now: float) -> None:
        self.forget(sequence.handle)
        self._recent[sequence.handle] = (now, sequence)
        self._recent_tokens += sequence.num_tokens
