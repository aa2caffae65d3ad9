"""Where each tensor of a checkpoint goes, and the one loop that fills a model from named tensors.

A layer describes its parameters as slots; a slot knows the shape the checkpoint must have and the part of it this rank
keeps. Nothing here knows a file format: `loader` yields (name, tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvferry_engine.errors import WeightsInvalidError

MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint.

    `destination` receives elements [start, start + size) along `dim` of the checkpoint's tensor, size being the
    destination's own; `loaded` is called after the copy. A destination may be longer than what is left (padding stays).
    """

    shape: tuple[int, ...]
    destination: Tensor
    loaded: Callable[[], None]
    dim: int = 0
    start: int = 0

    def load(self, tensor: Tensor) -> None:
        """Copy this rank's part, converting dtype and device."""
        count = max(min(self.destination.shape[self.dim], self.shape[self.dim] - self.start), 0)
        if count:
            part = tensor.narrow(self.dim, self.start, count)
            self.destination.narrow(self.dim, 0, count).copy_(part)
        self.loaded()


Slots = dict[str, WeightSlot]


def fill(
    slots: Mapping[str, WeightSlot], weights: Iterable[tuple[str, Tensor]], *, ignored: Callable[[str], bool]
) -> None:
    """Load every slot exactly once.

    `ignored` names tensors that checkpoints carry and the model does not need (computed buffers, tied copies).
    Raises WeightsInvalidError for unexpected, repeated, misshapen and missing tensors, naming them.
    """
    pending = dict(slots)
    unexpected: list[str] = []
    for name, tensor in weights:
        slot = pending.pop(name, None)
        if slot is None:
            if name in slots:
                raise WeightsInvalidError(f"the checkpoint has the tensor {name} twice")
            if not ignored(name):
                unexpected.append(name)
            continue
        if tuple(tensor.shape) != slot.shape:
            raise WeightsInvalidError(
                f"tensor {name} has shape {list(tensor.shape)}, the model's config asks for {list(slot.shape)}"
            )
        slot.load(tensor)
    problems = []
    if pending:
        problems.append(f"missing: {_some(list(pending))}")
    if unexpected:
        problems.append(f"unexpected: {_some(unexpected)}")
    if problems:
        raise WeightsInvalidError(f"the checkpoint does not match the model; {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
