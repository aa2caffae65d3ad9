"""RMS norm layers, alone and fused with the residual sum before them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.weights import Slots, WeightSlot
from kvferry_kernels.rms_norm import rms_norm


class RMSNorm:
    """Root-mean-square norm over the last dimension, with a weight per feature."""

    def __init__(self, num_features: int, eps: float, *, context: LayerContext) -> None:
        self._weight = torch.ones(num_features, dtype=context.dtype, device=context.device)
        self._eps = eps
        self._backend = context.backend

    def slots(self, name: str) -> Slots:
        """Checkpoint name `name.weight`."""
        weight = self._weight
        return {f"{name}.weight": WeightSlot(shape=tuple(weight.shape), destination=weight, loaded=_nothing)}

    def __call__(self, x_TC: Tensor) -> Tensor:
        """Return norm(x) [T, C]."""
        return rms_norm(x_TC, self._weight, self._eps, backend=self._backend)

    def add(self, x_TC: Tensor, residual_TC: Tensor) -> Tensor:
        """Add x to `residual_TC` (fp32 or x's type) in place and return the norm of the sum [T, C] in x's type."""
        return rms_norm(x_TC, self._weight, self._eps, residual=residual_TC, backend=self._backend)

    def per_head(self, x_TNH: Tensor) -> Tensor:
        """Return the norm of each head [T, N, H], contiguous; tokens of the input may be strided."""
        return rms_norm(x_TNH, self._weight, self._eps, backend=self._backend)


def _nothing() -> None:
    """A norm needs no work after loading."""
