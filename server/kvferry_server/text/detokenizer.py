"""Incremental token ids to text: a stream must never show half a character and must end up equal to decoding everything.

Two ways: exact bytes per token fed through an incremental UTF-8 decoder (byte-level and byte-fallback vocabularies; one
dictionary look-up a token), and a sliding window over the tokenizer's own decoder for vocabularies whose spacing depends on
neighbours. `stop_strings` reads what comes out.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

PROMPT_TAIL_TOKENS = 6
"""Prompt ids a window detokenizer looks back at: enough for the longest character and the spacing rules of WordPiece."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one sequence, token by token."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token (often empty within a character)."""
        ...

    def flush(self) -> str:
        """Return what is left at the end of the sequence; incomplete characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """Detokenizer for vocabularies in which every token stands for fixed bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decoder = _utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer that decodes a short window twice, without and with the new token, and returns the difference.

    `_ids[:_read]` has been returned; decoding starts at `_start`, one returned piece earlier, so that spacing comes out right.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_tail: list[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_tail[-PROMPT_TAIL_TOKENS:])
        self._start = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._window()
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:
            del self._ids[: self._start]
            self._start, self._read = 0, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._window()
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        return self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
