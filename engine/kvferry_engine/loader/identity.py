"""Names what makes two engines interchangeable, so that KV and streams only move between equal ones.

`weights_id` says which weights, without reading all of them; `pair_hash` which KV blocks mean the same; `output_hash` which
engines continue a stream with the same tokens. All are hex SHA-256 digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry_engine.wire.messages import KVLayout

SAMPLE_BYTES = 64 << 10
SAMPLE_STRIDE_BYTES = 64 << 20
KV_FORMAT = "layer,block,kv,head,slot,dim/1"
"""Order of a ferried payload; changes whenever its bytes would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One weight file; its first `header_bytes` describe the tensors."""

    path: Path
    header_bytes: int


def weights_id(config: Mapping[str, Any], shards: Iterable[Shard]) -> str:
    """Digest the config and of each file: name, size, header, and 64 KiB every 64 MiB and at the end.

    Blocks on the file system; raises OSError when a file cannot be read.
    """
    digest = hashlib.sha256(_canonical(config))
    for shard in shards:
        size = shard.path.stat().st_size
        digest.update(_canonical([shard.path.name, size, shard.header_bytes]))
        with shard.path.open("rb") as file:
            digest.update(file.read(shard.header_bytes))
            for offset in (*range(shard.header_bytes, size, SAMPLE_STRIDE_BYTES), max(size - SAMPLE_BYTES, 0)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def dummy_weights_id(config: Mapping[str, Any], seed: int) -> str:
    """Return the id of random weights."""
    return hashlib.sha256(_canonical(["dummy", seed, dict(config)])).hexdigest()


def pair_hash(weights: str, layout: KVLayout, *, kv_quantisation: str = "none") -> str:
    """Digest what must be equal for KV blocks to be exchanged; `layout` carries dtype and block size, and no TP."""
    fields = msgspec.to_builtins(layout)
    return hashlib.sha256(_canonical([KV_FORMAT, weights, fields, kv_quantisation])).hexdigest()


def output_hash(weights: str, *, assets_digest: str, dtype: str, adapters: Iterable[str] = ()) -> str:
    """Digest what must be equal for a stream to be resumed; `assets_digest` covers tokenizer and template."""
    return hashlib.sha256(_canonical([weights, assets_digest, dtype, sorted(adapters)])).hexdigest()


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
