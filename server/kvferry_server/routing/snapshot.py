"""What routing decisions look at: plain values of one moment, so that every decision is a table in a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry_engine.wire.messages import KVLayout, Role
from kvferry_server.routing.load_book import LoadView

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """One engine at the moment of a decision. `cached_tokens`: leading tokens of this prompt in its prefix cache."""

    boot: str
    name: str
    address: str
    role: Role = Role.BOTH
    pair_hash: str = ""
    block_size: int = 32
    kv_bytes_per_token: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    load: LoadView = field(default_factory=LoadView)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What a decision knows about a request; `num_prompt_tokens` counts emitted tokens of earlier attempts too."""

    num_prompt_tokens: int
    num_sequences: int = 1
    max_tokens: int = 128
    session_id: str = ""
    needs_local_prefill: bool = False
    """Prompt log-probs come from the engine that samples."""


def kv_bytes_per_token(layout: KVLayout) -> int:
    """Return the bytes of K and V of one token in all layers; unknown dtypes count as one byte (fp8)."""
    values = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    return values * _DTYPE_BYTES.get(layout.dtype, 1)
