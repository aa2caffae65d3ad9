"""Content hashes of KV blocks, equal in engines and routers.

A full block's hash is ``SHA-256(parent 16 bytes || token ids as int32 little endian)[:16]``; the first block's parent is the
namespace root, which separates LoRA adapters, cache salts and media. Engines hash for themselves; a router's hashes only
route.
"""

from __future__ import annotations

import hashlib

HASH_BYTES = 16


def namespace_root(lora_digest: str = "", cache_salt: str = "", media_digests: tuple[str, ...] = ()) -> bytes:
    """Return the parent of the first block for one (adapter, salt, media) namespace. [16 bytes]"""
    digest = hashlib.sha256()
    for part in (lora_digest, cache_salt, *media_digests):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return digest.digest()[:HASH_BYTES]


def chain_hashes(
    ids: bytes, block_size: int, root: bytes, *, start_block: int = 0, stop_block: int | None = None
) -> list[bytes]:
    """Return the hashes of the full blocks in `ids` (packed int32, see `packing.pack_ids`).

    `root` is the hash of the block before `start_block` (the namespace root when that is 0).
    """
    stride = block_size * 4
    last = len(ids) // stride if stop_block is None else min(stop_block, len(ids) // stride)
    parent = root
    hashes = []
    for block in range(start_block, last):
        parent = hashlib.sha256(parent + ids[block * stride : (block + 1) * stride]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes
