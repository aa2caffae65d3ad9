"""One model's tokenizer as the dialects need it: ids, exact bytes of single tokens, and a detokenizer for streams.

Built from the asset bundle's `tokenizers` JSON; encoding releases the GIL, so callers run it in worker threads
(`model_text`). The bytes of a token are exact for byte-level and byte-fallback vocabularies, which are nearly all that
generate; `detokenizer` continues the story.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer

from kvferry_engine.wire.assets import AssetBundle

from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

MAX_TOKEN_ID = 2**32 - 1
"""`tokenizers` keeps ids in 32 bits; larger ones are outside every vocabulary."""


class ModelTokenizer:
    """Text to ids and back. Thread-safe after construction; construction takes up to a second for large vocabularies."""

    def __init__(self, bundle: AssetBundle) -> None:
        spec: dict[str, Any] = json.loads(bundle.tokenizer_json)
        self._tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        direction = (spec.get("truncation") or {}).get("direction", "right")
        self.truncation_side: str = str(direction).lower()
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.max_token_chars: int = max(map(len, vocabulary), default=1)
        bos = bundle.special_tokens.get("bos_token")
        self.bos_id: int | None = vocabulary.get(bos) if bos else None
        self._prepend_bos = bundle.add_bos_token and self.bos_id is not None and self.bos_id not in self._probe()
        self._to_bytes = _piece_decoder(spec.get("decoder"))
        self._cached_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    def _probe(self) -> list[int]:
        """Return the ids that encoding adds by itself."""
        return list(self._tokenizer.encode("", add_special_tokens=True).ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`. Slow for long texts: call it in a worker thread."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._prepend_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; ids outside the vocabulary decode to nothing."""
        known = [i for i in ids if 0 <= i <= MAX_TOKEN_ID]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, ids: list[int]) -> list[str]:
        """Return the vocabulary entries of `ids`, empty for unknown ones."""
        return [self._tokenizer.id_to_token(i) or "" if i <= MAX_TOKEN_ID else "" for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in running text; exact unless the vocabulary has no byte form."""
        return self._cached_bytes(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        if self._to_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        return b"" if piece is None else self._to_bytes(piece)

    def detokenizer(self, prompt_tail: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Return a detokenizer for what follows a prompt; `prompt_tail` are its last ids (spacing may depend on them)."""
        if self._to_bytes is not None:
            return ByteDetokenizer(self.token_bytes, self.special_ids if skip_special_tokens else frozenset())

        def decode(ids: list[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, prompt_tail)


def _piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """Return how a vocabulary entry becomes bytes, or None when that depends on its neighbours."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_piece
    # Strip only removes the space in front of a whole text, which a continuation of a prompt keeps.
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        return partial(_byte_fallback_piece, replacements)
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level vocabularies write bytes with (GPT-2, Radford et al. 2019).

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        # An added token with characters outside the alphabet is plain text.
        return piece.encode()


def _byte_fallback_piece(replacements: list[tuple[str, str]], piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return piece.encode()
    for old, new in replacements:
        piece = piece.replace(old, new)
    return piece.encode()
