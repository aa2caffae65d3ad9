"""The gated activation in fp32: gate * sigmoid(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """See `silu_mul.silu_mul`."""
    gate, up = x.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
