"""The frames of a chat stream. The frame of a plain text delta is put together from bytes: it is written once per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry_server.api.generation.logprobs import LogprobPrinter
from kvferry_server.api.generation.reader import Delta
from kvferry_server.streaming import ChunkWriter, encode_json, key_value

Usage = dict[str, Any] | None


class ChatChunkPrinter:
    """Writes the chunks of one chat stream. `fingerprint` goes into finish chunks; None: it comes with the usage chunk."""

    def __init__(
        self,
        head: Mapping[str, Any],
        *,
        logprobs: LogprobPrinter | None,
        shows_token_ids: bool,
        fingerprint: str | None,
    ) -> None:
        self._writer = ChunkWriter(head)
        self._logprobs = logprobs
        self._shows_token_ids = shows_token_ids
        self._finish_extra = b"" if fingerprint is None else key_value("system_fingerprint", fingerprint)

    def role(
        self, index: int, role: str, *, prompt_ids: list[int] | None, prompt_text: str | None, usage: Usage
    ) -> bytes:
        """Return the first chunk of a choice."""
        choice = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}' % (
            index,
            encode_json(role),
        )
        extra = key_value("prompt_token_ids", prompt_ids) + key_value("prompt_text", prompt_text)
        return self._writer.frame(choice, extra + _usage(usage))

    def echo(self, index: int, text: str, *, usage: Usage) -> bytes:
        """Return the chunk that repeats the last message."""
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
            index,
            encode_json(text),
        )
        return self._writer.frame(choice, _usage(usage))

    def delta(self, delta: Delta, *, usage: Usage) -> bytes | None:
        """Return the chunk for new tokens; None when there is nothing to show yet."""
        is_last = delta.finish_reason is not None
        if not delta.text and not is_last and self._logprobs is None and not self._shows_token_ids:
            return None
        choice = b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b%b,"token_ids":%b}' % (
            delta.index,
            b'"content":' + encode_json(delta.text) if delta.text else b"",
            self._printed(delta),
            encode_json(delta.finish_reason),
            key_value("stop_reason", delta.stop_reason) if is_last else b"",
            encode_json(delta.token_ids) if self._shows_token_ids else b"null",
        )
        return self._writer.frame(choice, (self._finish_extra if is_last else b"") + _usage(usage))

    def _printed(self, delta: Delta) -> bytes:
        if self._logprobs is None or not delta.logprobs:
            return b"null"
        return encode_json(self._logprobs.chat(delta.logprobs))


def _usage(usage: Usage) -> bytes:
    return b"" if usage is None else key_value("usage", usage)
