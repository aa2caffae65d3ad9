"""The gated activation on the GPU: one elementwise pass."""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import COMPILE_OPTIONS
from kvferry_kernels.variants import TRITON_TYPES, Arch, Launch, Variant

TILE = 1024
LAUNCH = Launch(num_warps=4, num_stages=1)


@triton.jit
def silu_mul_kernel(out, x, width, TILE: tl.constexpr):
    """Write TILE columns of one row; program (row, column tile). out [T, I]; x [T, 2I]; width = I."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask)


def silu_mul(x: Tensor) -> Tensor:
    """See `silu_mul.silu_mul`."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(width, TILE))](
            out,
            x,
            width,
            TILE=TILE,
            num_warps=LAUNCH.num_warps,
            num_stages=LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )
    return out


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    return [
        Variant(
            kernel=silu_mul_kernel,
            label=TRITON_TYPES[dtype],
            types={"out": "*" + TRITON_TYPES[dtype], "x": "*" + TRITON_TYPES[dtype], "width": "i32"},
            constants={"TILE": TILE},
            launch=LAUNCH,
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]
