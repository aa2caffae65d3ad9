"""Merging of split attention on the GPU: one program per row reads the parts' log-sum-exps, then weighs their values."""

# Kernels are typed by Triton, from the arguments of each launch.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry_kernels.device_math import COMPILE_OPTIONS, LN_2, LOG2_E, finite_or_zero
from kvferry_kernels.variants import TRITON_TYPES, Arch, Launch, Variant

PARTS_PER_STEP = 8
LAUNCH = Launch(num_warps=4, num_stages=1)


@triton.jit
def merge_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    num_parts,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of one row; program (row).

    out [R, D] any float dtype; lse [R] fp32; partial_out [R, P, D] fp32; partial_lse [R, P] fp32, -inf marks empty parts,
    whose values are not read. num_parts = P. HEAD_DIM = D, padded to a power of two; PARTS: parts read at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    maximum = tl.full([PARTS], float("-inf"), tl.float32)
    for start in range(0, num_parts, PARTS):
        mask = start + parts < num_parts
        maximum = tl.maximum(maximum, tl.load(partial_lse + row * num_parts + start + parts, mask, other=float("-inf")))
    reference = finite_or_zero(tl.max(maximum, 0))
    total = 0.0
    merged = tl.zeros([PADDED_HEAD_DIM], tl.float32)
    for start in range(0, num_parts, PARTS):
        mask = start + parts < num_parts
        part_lse = tl.load(partial_lse + row * num_parts + start + parts, mask, other=float("-inf"))
        weights = tl.exp2((part_lse - reference) * LOG2_E)
        wanted = (part_lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (row * num_parts + start + parts)[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(partial_out + offsets, wanted, other=0.0)
        merged += tl.sum(weights[:, None] * values, 0)
        total += tl.sum(weights, 0)
    # A row whose parts are all empty has total 0: its values become zeros, its log-sum-exp -inf.
    merged = merged / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty), dims < HEAD_DIM)
    tl.store(lse + row, tl.where(total > 0.0, reference + tl.log2(total) * LN_2, float("-inf")))


def merge_states(partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `merge.merge_states`."""
    num_rows, num_parts, head_dim = partial_out.shape
    out = torch.empty(num_rows, head_dim, dtype=dtype, device=partial_out.device)
    lse = torch.empty(num_rows, dtype=torch.float32, device=partial_out.device)
    if num_rows:
        merge_kernel[(num_rows,)](
            out,
            lse,
            partial_out,
            partial_lse,
            num_parts,
            HEAD_DIM=head_dim,
            PADDED_HEAD_DIM=triton.next_power_of_2(head_dim),
            PARTS=PARTS_PER_STEP,
            num_warps=LAUNCH.num_warps,
            num_stages=LAUNCH.num_stages,
            **COMPILE_OPTIONS,
        )
    return out, lse


def variants(arch: Arch) -> list[Variant]:
    """Return what the compile gate checks."""
    return [
        Variant(
            kernel=merge_kernel,
            label=f"D{head_dim} {TRITON_TYPES[dtype]}",
            types={
                "out": "*" + TRITON_TYPES[dtype],
                "lse": "*fp32",
                "partial_out": "*fp32",
                "partial_lse": "*fp32",
                "num_parts": "i32",
            },
            constants={
                "HEAD_DIM": head_dim,
                "PADDED_HEAD_DIM": triton.next_power_of_2(head_dim),
                "PARTS": PARTS_PER_STEP,
            },
            launch=LAUNCH,
            unaligned=("num_parts",),
        )
        for head_dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (80, torch.float16))
    ]
