"""Kubernetes quantities of memory, as numbers of bytes that a command line can carry."""

from __future__ import annotations

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def to_bytes(quantity: int | str) -> int:
    """Return the bytes of a quantity such as 4Gi, in the form the schema admits. Raises ValueError otherwise."""
    if isinstance(quantity, int):
        return quantity
    for suffix, factor in (_BINARY | _DECIMAL).items():
        if quantity.endswith(suffix):
            return int(quantity.removesuffix(suffix)) * factor
    return int(quantity)
