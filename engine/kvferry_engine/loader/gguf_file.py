"""Reads the structure of GGUF files: metadata and where each tensor lies, with every read checked against the file's end.

Format: ggml's docs/gguf.md, versions 2 and 3, little endian. The values of tensors are `gguf_weights`' business.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 2
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types and their struct codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's place: `shape` in row-major order, bytes [start, start + num_bytes) of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A parsed file. `data` is a private mapping: it may be viewed as writable memory, the file does not change."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap
    header_bytes: int


def open_gguf(path: Path) -> GgufFile:
    """Parse a file. Raises WeightsInvalidError for damage and UnsupportedModelError for unknown tensor types."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise WeightsInvalidError(f"{path} is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    reader = _Reader(path, data, size)
    reader.offset = len(MAGIC)
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise WeightsInvalidError(f"{path} has GGUF version {version}; little-endian versions 2 and 3 can be read")
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    places = [reader.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise WeightsInvalidError(f"{path} is damaged: general.alignment is {alignment!r}")
    start = reader.offset + -reader.offset % alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in places:
        tensor = _place(path, name, shape, kind, start + offset)
        if tensor.start + tensor.num_bytes > size:
            raise WeightsInvalidError(
                f"{path} is cut short: tensor {name} ends at byte {tensor.start + tensor.num_bytes}, the file has {size}; "
                "download it again"
            )
        if name in tensors:
            raise WeightsInvalidError(f"{path} is damaged: it has the tensor {name} twice")
        tensors[name] = tensor
    return GgufFile(path=path, metadata=metadata, tensors=tensors, data=data, header_bytes=start)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    try:
        known = GGMLQuantizationType(kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has the unknown type {kind}; a newer gguf package may know it"
        ) from error
    if shape and shape[-1] % block_elements:
        raise WeightsInvalidError(
            f"{path} is damaged: rows of tensor {name} have {shape[-1]} elements, {known.name} stores {block_elements} at a time"
        )
    num_bytes = math.prod(shape) // block_elements * block_bytes
    return GgufTensor(name=name, kind=known, shape=shape, start=start, num_bytes=num_bytes)


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.offset = 0
        self._path = path
        self._data = data
        self._size = size

    def scalar(self, code: str) -> Any:
        """Read one little-endian number."""
        return self._unpack(f"<{code}")[0]

    def string(self) -> str:
        """Read a length and so many bytes of UTF-8; bytes that are not UTF-8 become replacement characters."""
        length = self.scalar("Q")
        end = self._end(length)
        text = self._data[self.offset : end].decode("utf-8", errors="replace")
        self.offset = end
        return text

    def value(self, kind: int, nesting: int = 0) -> Any:
        """Read a metadata value of a type; arrays become lists."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY or nesting == MAX_NESTING:
            raise WeightsInvalidError(f"{self._path} is damaged: metadata value type {kind} near byte {self.offset}")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in SCALARS:
            # Checked before the format string is made: a damaged count must not become a huge one.
            self._end(count * struct.calcsize(f"<{SCALARS[item_kind]}"))
            return list(self._unpack(f"<{count}{SCALARS[item_kind]}"))
        return [self.value(item_kind, nesting + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape (row-major), type and offset into the data of one tensor."""
        name, num_dimensions = self.string(), self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise WeightsInvalidError(f"{self._path} is damaged: tensor {name!r} has {num_dimensions} dimensions")
        shape = self._unpack(f"<{num_dimensions}Q")[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        end = self._end(struct.calcsize(form))
        values = struct.unpack_from(form, self._data, self.offset)
        self.offset = end
        return values

    def _end(self, length: int) -> int:
        if self.offset + length > self._size:
            raise WeightsInvalidError(
                f"{self._path} is cut short or damaged: its header goes on after the last of its {self._size} bytes; "
                "download it again"
            )
        return self.offset + length
