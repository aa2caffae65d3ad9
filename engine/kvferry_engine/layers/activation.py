"""Gated activations of MLPs, by their Hugging Face name."""

from __future__ import annotations

from torch import Tensor

from kvferry_engine.errors import UnsupportedModelError
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.silu_mul import silu_mul

SILU_NAMES = ("silu", "swish")


class SiluAndMul:
    """silu(gate) * up, gate being the first half of the input's features."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]."""
        return silu_mul(gate_up, backend=self._backend)


def gated_activation(name: str, backend: Backend) -> SiluAndMul:
    """Return the gated activation called `name` in a config. Raises UnsupportedModelError for others than silu."""
    if name not in SILU_NAMES:
        raise UnsupportedModelError(
            f"hidden activation {name!r} is not supported in gated MLPs; supported: {', '.join(SILU_NAMES)}"
        )
    return SiluAndMul(backend)
