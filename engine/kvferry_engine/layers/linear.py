"""Matrix products with weights, split over ranks: by output features (column), by input features (row), or not at all.

Projections that read the same input are merged into one product (q, k, v; gate and up), which loading undoes: every part
keeps the checkpoint's name. On a CPU the weight is repacked for oneDNN once all its parts are there and the plain copy is
freed, so at no time are two copies of more than one layer alive.

Shape suffixes: T tokens, I input features, O output features (of this rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.parallel import TensorParallel
from kvferry_engine.layers.weights import Slots, WeightSlot
from kvferry_kernels.linear import PackedWeight, linear, pack


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a merged product: `rows` output features of `total`, from `start` on, live on this rank."""

    name: str
    total: int
    start: int
    rows: int


def replicated_part(name: str, features: int) -> Part:
    """Every rank computes all features."""
    return Part(name, features, 0, features)


def even_part(name: str, features: int, parallel: TensorParallel) -> Part:
    """Features split evenly. Raises InvalidTensorParallelError."""
    start, rows = parallel.split(features, f"features of {name}")
    return Part(name, features, start, rows)


def query_part(name: str, num_heads: int, head_dim: int, parallel: TensorParallel) -> Part:
    """Query heads split evenly. Raises InvalidTensorParallelError."""
    first, count = parallel.split(num_heads, "attention heads")
    return Part(name, num_heads * head_dim, first * head_dim, count * head_dim)


def kv_part(name: str, num_kv_heads: int, head_dim: int, parallel: TensorParallel) -> Part:
    """KV heads split evenly, or replicated when there are more ranks. Raises InvalidTensorParallelError."""
    first, count = parallel.split_kv_heads(num_kv_heads)
    return Part(name, num_kv_heads * head_dim, first * head_dim, count * head_dim)


class LinearWeight:
    """A weight [O, I] with optional bias [O] that is filled part by part and then packed for its device."""

    def __init__(
        self, out_features: int, in_features: int, *, bias: bool, num_pending: int, context: LayerContext
    ) -> None:
        self.plain = torch.empty(out_features, in_features, dtype=context.dtype, device=context.device)
        self.bias = torch.zeros(out_features, dtype=context.dtype, device=context.device) if bias else None
        self._packed: PackedWeight | None = None
        self._num_pending = num_pending

    def loaded(self) -> None:
        """One more tensor has arrived; the last one triggers packing, which keeps a GPU's weight as it is."""
        self._num_pending -= 1
        if self._num_pending == 0:
            self._packed = pack(self.plain)
            self.plain = self.plain.new_empty(0)

    def apply(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]. Every part must be loaded."""
        assert self._packed is not None
        return linear(x_TI, self._packed, self.bias)


class ColumnLinear:
    """One or more projections of the same input, merged; output features of the parts lie one after the other."""

    def __init__(self, in_features: int, parts: Sequence[Part], *, bias: bool, context: LayerContext) -> None:
        self.parts = tuple(parts)
        self._in_features = in_features
        num_tensors = len(self.parts) * (2 if bias else 1)
        rows = sum(part.rows for part in self.parts)
        self._weight = LinearWeight(rows, in_features, bias=bias, num_pending=num_tensors, context=context)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names `prefix.<part>.weight` (and `.bias`)."""
        slots: Slots = {}
        weight, first = self._weight, 0
        for part in self.parts:
            name = f"{prefix}.{part.name}"
            slots[f"{name}.weight"] = WeightSlot(
                shape=(part.total, self._in_features),
                destination=weight.plain.narrow(0, first, part.rows),
                start=part.start,
                loaded=weight.loaded,
            )
            if weight.bias is not None:
                slots[f"{name}.bias"] = WeightSlot(
                    shape=(part.total,),
                    destination=weight.bias.narrow(0, first, part.rows),
                    start=part.start,
                    loaded=weight.loaded,
                )
            first += part.rows
        return slots

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, sum of the parts' rows]."""
        return self._weight.apply(x_TI)


class RowLinear:
    """A projection whose input features are split; the ranks' partial products are summed."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        """Raises InvalidTensorParallelError when the input features do not divide."""
        self._parallel = context.parallel
        self._shape = (out_features, in_features)
        self._start, columns = self._parallel.split(in_features, "input features")
        self._weight = LinearWeight(out_features, columns, bias=bias, num_pending=2 if bias else 1, context=context)

    def slots(self, name: str) -> Slots:
        """Checkpoint names `name.weight` (and `.bias`). The bias stays zero on every rank but 0, so that it counts once."""
        weight = self._weight
        slots = {
            f"{name}.weight": WeightSlot(
                shape=self._shape, destination=weight.plain, dim=1, start=self._start, loaded=weight.loaded
            )
        }
        if weight.bias is not None:
            kept = weight.bias if self._parallel.rank == 0 else torch.empty_like(weight.bias)
            slots[f"{name}.bias"] = WeightSlot(shape=self._shape[:1], destination=kept, loaded=weight.loaded)
        return slots

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O], equal on every rank."""
        return self._parallel.all_reduce(self._weight.apply(x_TI))
