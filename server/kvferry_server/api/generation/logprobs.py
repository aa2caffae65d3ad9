"""Log-probabilities as the two OpenAI dialects print them.

Both list the sampled token first. The bytes of a token are exact, also when it holds half a character.
"""

from __future__ import annotations

from typing import Any

from kvferry_engine.wire.messages import TokenLogprobs
from kvferry_engine.wire.packing import unpack_ids
from kvferry_server.text.tokenizer import ModelTokenizer

LOWEST = -9999.0
"""Printed for minus infinity, which JSON does not have."""


class LogprobPrinter:
    """Prints the log-probs of one request. `depth` alternatives (-1: all that came); `as_ids` prints token_id:N."""

    def __init__(self, tokenizer: ModelTokenizer, *, depth: int, as_ids: bool, only_requested_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._depth = -1 if only_requested_ids else depth
        self._as_ids = as_ids

    def chat(self, positions: list[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` object of a chat choice; the sampled token takes one of the places."""
        content = []
        for position in positions:
            entries = _entries(position)
            shown = entries if self._depth == -1 else entries[: self._depth]
            head = self._chat_entry(*entries[0])
            head["top_logprobs"] = [self._chat_entry(token_id, value) for token_id, value in shown]
            content.append(head)
        return {"content": content}

    def completion(
        self, token_ids: list[int], positions: list[TokenLogprobs | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Return the `logprobs` object of a completion choice and the text offset behind it.

        `positions` is parallel to `token_ids`; None (the first token of a prompt) prints nulls.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            offsets.append(offset)
            tokens.append(self._name(token_id))
            offset += len(tokens[-1])
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            entries = _entries(position)
            shown = entries if self._depth == -1 else entries[: self._depth + 1]
            values.append(max(entries[0][1], LOWEST))
            top: dict[str, float] = {}
            for other_id, value in shown:
                top.setdefault(self._name(other_id), max(value, LOWEST))
            tops.append(top)
        printed = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
        return printed, offset

    def prompt(self, positions: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs`: per prompt token a map from id to its figures, the actual token first."""
        return [None if position is None else self._prompt_entry(position) for position in positions]

    def _prompt_entry(self, position: TokenLogprobs) -> dict[str, Any]:
        ranks = unpack_ids(position.ranks)
        printed: dict[str, Any] = {}
        for n, token_id in enumerate(unpack_ids(position.ids)):
            if str(token_id) not in printed:
                printed[str(token_id)] = {
                    "logprob": max(position.values[n], LOWEST),
                    "rank": ranks[n] if n < len(ranks) else None,
                    "decoded_token": self._text(token_id),
                }
        return printed

    def _chat_entry(self, token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(value, LOWEST),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id)


def _entries(position: TokenLogprobs) -> list[tuple[int, float]]:
    """Return (id, value) of the sampled token and the alternatives, each id once."""
    entries: dict[int, float] = {}
    for token_id, value in zip(unpack_ids(position.ids), position.values, strict=True):
        entries.setdefault(token_id, value)
    return list(entries.items())
