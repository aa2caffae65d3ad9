"""The gated activation between the merged gate-up projection and the down projection."""

from __future__ import annotations

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.silu_mul import cpu, reference

__all__ = ["silu_mul"]


def silu_mul(x: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Return silu(gate) * up, [T, I] contiguous in the dtype of x [T, 2I] (contiguous), whose first half is the gate."""
    match choose(backend, x):
        case Backend.CPU:
            return cpu.silu_mul(x)
        case Backend.REFERENCE:
            return reference.silu_mul(x)
        case Backend.TRITON:
            from kvferry_kernels.silu_mul import triton

            return triton.silu_mul(x)
