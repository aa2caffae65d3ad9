"""Token ids and floats as little-endian byte columns, the form in which arrays travel in messages."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return `ids` as int32 little endian. Raises OverflowError for ids outside int32."""
    column = array("i", ids)
    if sys.byteorder == "big":  # pragma: no cover - no such machine serves models
        column.byteswap()
    return column.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the ids of a packed int32 column. Raises ValueError when the length is not a multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"a packed id column has a multiple of 4 bytes, this one has {len(data)}")
    column = array("i")
    column.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover - no such machine serves models
        column.byteswap()
    return column.tolist()


def num_ids(data: bytes) -> int:
    """Return how many ids a packed column holds."""
    return len(data) // 4
