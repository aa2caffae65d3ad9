"""Stop strings in streamed text: found across token borders, and never shown by half.

The text that could still turn into a stop string is held back, no more. Matching is Knuth, Morris and Pratt's (1977), one
automaton per stop string, so long stop strings cost nothing per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """What `StopStrings.push` found: `text` may be shown; `stop` is the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


def _borders(pattern: str) -> list[int]:
    """Return for each prefix of `pattern` the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = borders[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        borders[i] = matched
    return borders


class StopStrings:
    """Watches the text of one sequence. `include`: the stop string itself is shown (then nothing needs holding back)."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = list(stops)
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> Cut:
        """Take new text and return what may be shown. After a stop was found, push nothing more."""
        for position, character in enumerate(text):
            completed = self._advance(character)
            if completed is not None:
                known = self._held + text[: position + 1]
                shown = known if self._include else known[: len(known) - len(completed)]
                self._held = ""
                return Cut(shown, completed)
        known = self._held + text
        hold = 0 if self._include else max(self._matched, default=0)
        self._held = known[len(known) - hold :]
        return Cut(known[: len(known) - hold])

    def flush(self) -> str:
        """Return the text still held back; the sequence ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; return the longest stop string that is now complete."""
        completed: str | None = None
        for n, stop in enumerate(self._stops):
            matched = self._matched[n]
            while matched and stop[matched] != character:
                matched = self._borders[n][matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[n] = matched
            if matched == len(stop):
                self._matched[n] = self._borders[n][-1]
                if completed is None or len(stop) > len(completed):
                    completed = stop
        return completed
