"""Merging of attention results over disjoint sets of keys: the second half of split-KV decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.merge import cpu, reference

__all__ = ["merge_states"]


def merge_states(
    partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the union of the parts: out [R, D] in `dtype` and its log-sum-exp [R] fp32.

    partial_out [R, P, D] fp32 holds normalised attention of row r over part p, partial_lse [R, P] fp32 the natural
    log-sum-exp of its scores; -inf marks an empty part, whose values are not used. A row of empty parts yields zeros.
    """
    match choose(backend, partial_out):
        case Backend.CPU:
            return cpu.merge_states(partial_out, partial_lse, dtype)
        case Backend.REFERENCE:
            return reference.merge_states(partial_out, partial_lse, dtype)
        case Backend.TRITON:
            from kvferry_kernels.merge import triton

            return triton.merge_states(partial_out, partial_lse, dtype)
