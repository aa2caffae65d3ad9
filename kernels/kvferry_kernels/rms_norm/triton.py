"""RMS normalisation on the GPU: several short rows, or one long row, per program."""

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

# Elements of one program's tile: heads of 64 share a program, hidden states of 4096 have it alone.
TILE_ELEMENTS = 4096
MAX_ROWS = 16


@triton.jit
def rms_norm_kernel(
    out,
    x,
    weight,
    residual,
    num_rows,
    rows_per_token,
    stride_token,
    eps,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalise ROWS rows; program (row tile).

    out [R, C]; x [T, H, C] with stride_token elements between tokens and R = T * H rows, H = rows_per_token; weight [C];
    residual [R, C] of any float type or None, which becomes residual + x. num_rows = R; WIDTH = C, padded to a power of two.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = (rows // rows_per_token * stride_token + rows % rows_per_token * WIDTH)[:, None] + columns[None, :]
    values = tl.load(x + offsets, mask, other=0.0).to(tl.float32)
    dense = rows[:, None] * WIDTH + columns[None, :]
    if residual is not None:
        values += tl.load(residual + dense, mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + dense, rounded, mask)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    scales = tl.load(weight + columns, columns < WIDTH, other=0.0).to(tl.float32)
    normed = values * inverse[:, None] * scales[None, :]
    tl.store(out + dense, normed.to(out.dtype.element_ty), mask)


def rows_and_launch(width: int) -> tuple[int, Launch]:
    """Return rows per program and launch options."""
    padded = triton.next_power_of_2(width)
    num_warps = min(16, max(4, padded // 512))
    return min(MAX_ROWS, max(1, TILE_ELEMENTS // padded)), Launch(num_warps=num_warps, num_stages=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `rms_norm.rms_norm`."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // width
    if num_rows == 0:
        return out
    rows, launch = rows_and_launch(width)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        out,
        x,
        weight,
        residual,
        num_rows,
        x.shape[1] if x.dim() == 3 else 1,
        x.stride(0),
        eps,
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
        ROWS=rows,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **COMPILE_OPTIONS,
    )
    return out


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    return [
        _variant(width, dtype, has_residual)
        for width, dtype, has_residual in (
            (576, torch.bfloat16, True),
            (4096, torch.bfloat16, True),
            (128, torch.bfloat16, False),
            (8192, torch.float16, True),
        )
    ]


def _variant(width: int, dtype: torch.dtype, has_residual: bool) -> Variant:
    rows, launch = rows_and_launch(width)
    name = "*" + TRITON_TYPES[dtype]
    types = {"out": name, "x": name, "weight": name, "residual": "*fp32", "num_rows": "i32", "rows_per_token": "i32"}
    types |= {"stride_token": "i32", "eps": "fp32"}
    constants = {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width), "ROWS": rows}
    if not has_residual:
        constants["residual"] = None
        del types["residual"]
    return Variant(
        kernel=rms_norm_kernel,
        label=f"C{width} {TRITON_TYPES[dtype]}{' fp32 residual' if has_residual else ''}",
        types=types,
        constants=constants,
        launch=launch,
        unaligned=("num_rows", "rows_per_token"),
    )
