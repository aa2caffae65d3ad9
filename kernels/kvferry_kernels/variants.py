"""How an op's Triton module tells the compile gate which specialisations of its kernels serve, and how tiles are chosen.

Tiles come from tables keyed by the device generation, never from tuning at run time: tuning would stall first requests,
break graph capture and let two ranks round differently. `aot` compiles every variant for every target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Arch(StrEnum):
    """Device generations that tile tables tell apart. SM80 stands for all others of NVIDIA, down to 99 KiB shared memory."""

    SM80 = "sm_80"
    SM90 = "sm_90"
    SM100 = "sm_100"
    GFX942 = "gfx942"


def arch_of(tensor: Tensor) -> Arch:
    """Return the generation of the tensor's device; SM80 for CPU tensors, which only the interpreter sees."""
    if not tensor.is_cuda:
        return Arch.SM80
    if torch.version.hip is not None:
        return Arch.GFX942
    major, _ = torch.cuda.get_device_capability(tensor.device)
    return {9: Arch.SM90, 10: Arch.SM100}.get(major, Arch.SM80)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Options of one kernel launch beside its arguments."""

    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One specialisation of a kernel: argument types in Triton's notation, values of the constexpr arguments, options.

    `kernel` is a triton.JITFunction. Arguments named in `unaligned` get no divisibility by 16, as the JIT decides from
    values; all others do. `expect_wgmma` makes the gate demand Hopper's matrix instruction in the sm_90 code.
    """

    kernel: Any
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    launch: Launch = field(default_factory=Launch)
    unaligned: tuple[str, ...] = ()
    expect_wgmma: bool = False


TRITON_TYPES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
