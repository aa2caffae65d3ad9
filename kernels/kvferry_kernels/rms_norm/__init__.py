"""Root-mean-square normalisation over the last axis, with the residual addition that precedes it in most models."""

from __future__ import annotations

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, contiguous in the dtype of x; the arithmetic is fp32.

    x [T, C], or [T, H, C] for norms per head, where tokens may be strided (a view of the merged qkv). weight [C] of any
    float dtype. With residual [T, C] (contiguous, dtype of x or fp32), `residual += x` happens in place, rounded to its
    dtype, and the norm is that of the new residual.
    """
    match choose(backend, x):
        case Backend.CPU:
            return cpu.rms_norm(x, weight, eps, residual)
        case Backend.REFERENCE:
            return reference.rms_norm(x, weight, eps, residual)
        case Backend.TRITON:
            from kvferry_kernels.rms_norm import triton

            return triton.rms_norm(x, weight, eps, residual)
