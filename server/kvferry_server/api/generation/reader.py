"""Token events of one sequence to what clients see: text, with stop strings cut out, and tokens that belong to it.

Pure and synchronous: no engines, no HTTP. `running` feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.wire.messages import FinishReason, TokenLogprobs
from kvferry_server.requests import TokenEvent
from kvferry_server.text.detokenizer import Detokenizer
from kvferry_server.text.stop_strings import StopStrings


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one event adds to a sequence. `finish_reason` is None until the last one."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    """Show the stop string, or the text of the stop token, too."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings count only in text after this many tokens."""


class SequenceReader:
    """Reads the events of one sequence in order; `num_tokens` and `finished` tell how far it is."""

    def __init__(self, index: int, detokenizer: Detokenizer, options: TextOptions) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._detokenizer = detokenizer
        self._options = options
        self._stops = StopStrings(options.stops, include=options.include_stop) if options.stops else None

    def read(self, event: TokenEvent) -> Delta:
        """Return what the event adds. A stop string ends the sequence, whatever the engine says, and drops later tokens."""
        finish = event.finish
        shown = len(event.token_ids)
        if finish is not None and finish.reason is FinishReason.STOP and not self._options.include_stop:
            shown -= 1
        pieces: list[str] = []
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if position >= shown:
                break
            text = self._detokenizer.push(token_id)
            if text:
                stop = self._take(text, pieces)
                if stop is not None:
                    return self._stopped(event, position + 1, pieces, stop)
        delta = Delta(index=self.index, text="", token_ids=event.token_ids, logprobs=event.logprobs)
        if finish is not None:
            rest = self._detokenizer.flush()
            if rest:
                self._take(rest, pieces)
            if self._stops is not None:
                pieces.append(self._stops.flush())
            self.finished = True
            delta.finish_reason = finish.reason.value
            delta.stop_reason = finish.stop_reason
            if finish.reason is FinishReason.REPETITION and delta.stop_reason is None:
                delta.stop_reason = "repetition_detected"
        delta.text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        return delta

    def _take(self, text: str, pieces: list[str]) -> str | None:
        """Add what may be shown of new text to `pieces`; return the stop string it completed."""
        if self._stops is None or self.num_tokens <= self._options.min_tokens:
            pieces.append(text)
            return None
        cut = self._stops.push(text)
        pieces.append(cut.text)
        return cut.stop

    def _stopped(self, event: TokenEvent, num_kept: int, pieces: list[str], stop: str) -> Delta:
        self.finished = True
        return Delta(
            index=self.index,
            text="".join(pieces),
            token_ids=event.token_ids[:num_kept],
            logprobs=event.logprobs[:num_kept] if event.logprobs is not None else None,
            finish_reason=FinishReason.STOP.value,
            stop_reason=stop,
        )
