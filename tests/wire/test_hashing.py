"""Block hashes: what must be equal is equal, what must differ differs."""

from __future__ import annotations

import hashlib

from kvferry_engine.wire.hashing import chain_hashes, namespace_root
from kvferry_engine.wire.packing import pack_ids


def test_a_block_hash_is_sha256_of_parent_and_little_endian_ids() -> None:
    root = namespace_root()
    expected = hashlib.sha256(root + b"".join(i.to_bytes(4, "little") for i in (5, 6))).digest()[:16]

    assert chain_hashes(pack_ids([5, 6, 7]), 2, root) == [expected]


def test_hashes_can_be_continued_from_the_last_known_block() -> None:
    ids = pack_ids(range(100))
    root = namespace_root()
    whole = chain_hashes(ids, 16, root)

    assert len(whole) == 6
    assert chain_hashes(ids, 16, whole[2], start_block=3) == whole[3:]
    assert chain_hashes(ids, 16, root, stop_block=2) == whole[:2]


def test_namespaces_do_not_mix() -> None:
    roots = {
        namespace_root(),
        namespace_root("a"),
        namespace_root("", "a"),
        namespace_root("", "", ("a",)),
        namespace_root("a", "b"),
        namespace_root("ab", ""),
    }

    assert len(roots) == 6
