"""The merge formula: each part weighs exp(lse of the part - lse of all)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `merge.merge_states`."""
    lse = torch.logsumexp(partial_lse, -1)
    empty = partial_lse == float("-inf")
    weights = torch.exp(partial_lse - lse[:, None]).masked_fill(empty, 0.0)
    values = partial_out.masked_fill(empty[..., None], 0.0)
    return (weights[..., None] * values).sum(1).to(dtype), lse
