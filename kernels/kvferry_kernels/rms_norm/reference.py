"""RMS normalisation in fp32 (Zhang and Sennrich: Root Mean Square Layer Normalization, NeurIPS 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `rms_norm.rms_norm`."""
    values = x.float()
    if residual is not None:
        residual.copy_(residual.float() + values)
        values = residual.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
