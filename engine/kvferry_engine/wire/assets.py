"""What a router needs of a model: made once by an engine, fetched by digest over the wire, never from disk."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class AssetBundle(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokenizer, templates and configuration of one model."""

    tokenizer_json: bytes
    """A `tokenizers` JSON file, whatever format the model came in."""
    chat_templates: dict[str, str] = {}
    """By name; `default` is the one used without tools, `tool_use` (when present) with tools."""
    special_tokens: dict[str, str] = {}
    """bos_token, eos_token, pad_token, unk_token as text, for templates."""
    eos_token_id: int | None = None
    """The model's own end-of-sequence id."""
    extra_eos_token_ids: list[int] = []
    """Further ids from generation_config.json; they report themselves as stop_reason."""
    add_bos_token: bool = False
    generation_config: dict[str, Any] = {}
    config: dict[str, Any] = {}
    tasks: list[str] = []
    max_model_len: int = 0


def encode_bundle(bundle: AssetBundle) -> tuple[str, bytes]:
    """Return (digest, bytes): the digest is the hex SHA-256 of the bytes."""
    data = msgspec.msgpack.Encoder(order="deterministic").encode(bundle)
    return hashlib.sha256(data).hexdigest(), data


def decode_bundle(digest: str, data: bytes) -> AssetBundle:
    """Parse and verify a bundle. Raises ValueError when the digest does not match."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise ValueError(f"asset bundle has digest {actual}, expected {digest}")
    return msgspec.msgpack.decode(data, type=AssetBundle)
