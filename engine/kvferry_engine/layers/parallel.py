"""How a layer is split over the ranks of an engine, so that layers can be written once for any tensor-parallel size.

A rank holds a slice of heads, of the MLP's inner features and of the vocabulary; two collectives put results together:
a sum after row-split products and a gather of logits on rank 0. `runner.ranks` builds the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry_engine.errors import InvalidTensorParallelError


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """What layers use of torch's process groups (gloo, NCCL); every rank calls the same operations in the same order."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> Work: ...


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Place of this process among the ranks. `group` is None exactly when `size` is 1."""

    rank: int = 0
    size: int = 1
    group: Collectives | None = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum `partial` (contiguous) over the ranks, in place, and return it. Blocks until all ranks take part."""
        if self.group is not None:
            self.group.allreduce([partial]).wait()
        return partial

    def gather_last(self, part: Tensor) -> Tensor | None:
        """Concatenate every rank's [..., n] along the last dimension on rank 0; None on the other ranks. Blocks."""
        if self.group is None:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self.group.allgather([parts], [part]).wait()
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` (contiguous) with rank 0's. Blocks."""
        if self.group is not None:
            self.group.broadcast(tensor, 0).wait()

    def split(self, total: int, what: str) -> tuple[int, int]:
        """Return (first, count) of this rank's equal share. Raises InvalidTensorParallelError when it does not divide."""
        if total % self.size:
            raise InvalidTensorParallelError(
                f"tensor parallel size {self.size} does not divide the model's {total} {what}; use a divisor of {total}"
            )
        count = total // self.size
        return self.rank * count, count

    def split_kv_heads(self, total: int) -> tuple[int, int]:
        """Return (first, count) of this rank's KV heads; with more ranks than KV heads, each head lives on several ranks.

        Raises InvalidTensorParallelError when neither number divides the other.
        """
        if total % self.size == 0:
            return self.split(total, "KV heads")
        if self.size % total:
            raise InvalidTensorParallelError(
                f"tensor parallel size {self.size} and the model's {total} KV heads do not divide each other"
            )
        return self.rank * total // self.size, 1


def check_split(parallel: TensorParallel, *, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
    """Raise InvalidTensorParallelError unless a model of this shape can be split over `parallel.size` ranks."""
    parallel.split(num_heads, "attention heads")
    parallel.split_kv_heads(num_kv_heads)
    parallel.split(intermediate_size, "MLP features")
