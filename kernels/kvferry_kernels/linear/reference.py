"""The linear layer in fp32."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., I] times the transpose of weight [O, I], plus bias [O], in the dtype of x."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
