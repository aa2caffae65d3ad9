"""The gated activation on CPUs: two fused torch operators, the second in place; silu is rounded to the dtype in between."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(x: Tensor) -> Tensor:
    """See `silu_mul.silu_mul`."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)
