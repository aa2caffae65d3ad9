"""Reads safetensors shards lazily: names, shapes and sizes from the header, values through the page cache when asked.

Damage is found when a file is opened, not when its last tensor is reached half an hour later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from kvferry_engine.errors import WeightsInvalidError
from kvferry_engine.loader.identity import Shard

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """An opened shard; `tensors` maps names, in file order, to (dtype as the format spells it, size in bytes)."""

    shard: Shard
    tensors: dict[str, tuple[str, int]]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in file order; the tensors are views of the mapped file. Raises WeightsInvalidError."""
        path = self.shard.path
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                for name in self.tensors:
                    yield name, file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise WeightsInvalidError(f"{path} is not a usable safetensors file: {error}") from error


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check the header of a shard. Raises WeightsInvalidError when the file is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise WeightsInvalidError(
                f"{path} is not a usable safetensors file: its header does not fit into its {size} bytes; "
                "it may be cut short or a Git LFS pointer, download it again"
            )
        header = file.read(length)
    start = LENGTH_BYTES + length
    tensors, end = _entries(path, header)
    if start + end != size:
        raise WeightsInvalidError(f"{path} has {size} bytes, its header describes {start + end}; download it again")
    return SafetensorsFile(shard=Shard(path=path, header_bytes=start), tensors=tensors)


def first_dtype(files: list[SafetensorsFile]) -> str:
    """Return the dtype of the first floating-point tensor, `float32` when there is none."""
    for file in files:
        for dtype, _ in file.tensors.values():
            if dtype in DTYPE_NAMES:
                return DTYPE_NAMES[dtype]
    return "float32"


def _entries(path: Path, header: bytes) -> tuple[dict[str, tuple[str, int]], int]:
    """Return the tensors in file order and the number of data bytes they cover."""
    try:
        spec: dict[str, Any] = json.loads(header)
        spec.pop("__metadata__", None)
        spans: list[tuple[int, int, str]] = []
        for name, entry in spec.items():
            start, stop = map(int, entry["data_offsets"])
            bits = _bits(entry["dtype"])
            if (
                start < 0
                or stop < start
                or (bits is not None and 8 * (stop - start) != bits * math.prod(entry["shape"]))
            ):
                raise WeightsInvalidError(
                    f"{path} is not a usable safetensors file: size and shape of tensor {name} disagree"
                )
            spans.append((start, stop, name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsInvalidError(f"{path} is not a usable safetensors file: its header cannot be read") from error
    spans.sort()
    tensors = {name: (str(spec[name]["dtype"]), stop - start) for start, stop, name in spans}
    return tensors, max((stop for _, stop, _ in spans), default=0)


def _bits(dtype: str) -> int | None:
    """Return the bits of an element, None for dtypes of which only the library knows the size."""
    name = DTYPE_NAMES.get(dtype)
    return None if name is None else 8 * int(getattr(torch, name).itemsize)
