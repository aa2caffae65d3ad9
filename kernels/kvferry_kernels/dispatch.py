"""The one rule by which an op picks its implementation: what the caller named, else what the device of the tensors asks for.

Ops import their Triton module only when that backend is chosen, so a CPU engine starts without Triton.
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor


class Backend(StrEnum):
    """Who computes an op: `reference` is the obvious fp32 formula, `triton` the GPU kernel, `cpu` the fast torch path."""

    REFERENCE = "reference"
    TRITON = "triton"
    CPU = "cpu"


def choose(backend: Backend | None, tensor: Tensor) -> Backend:
    """Return `backend`, or the default of the tensor's device: TRITON on GPUs (CUDA and HIP), CPU elsewhere."""
    if backend is not None:
        return backend
    return Backend.TRITON if tensor.is_cuda else Backend.CPU
