"""What every layer is told at construction, in one value instead of six arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvferry_engine.layers.parallel import TensorParallel
from kvferry_kernels.dispatch import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Place, type and kernels of a model's layers.

    `backend` computes attention and the small fused ops; `max_model_len` is the longest sequence (prompt + output) the
    engine will run, which sizes the rotary table.
    """

    dtype: torch.dtype
    device: torch.device
    backend: Backend
    max_model_len: int
    parallel: TensorParallel = field(default_factory=TensorParallel)
