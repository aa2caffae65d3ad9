"""Choosing the next token: penalties, the three truncations, and a draw that depends on seed and position only.

Order of a step: `apply_penalties`, division by the temperature, `top_k_top_p_min_p`, `gumbel_argmax`; `greedy` where the
temperature is zero.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from kvferry_kernels.dispatch import Backend, choose
from kvferry_kernels.sampler import cpu, reference

__all__ = ["apply_penalties", "greedy", "gumbel_argmax", "top_k_top_p_min_p"]


def greedy(logits: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Return the id [B] int64 of the largest of logits [B, V] fp32 (contiguous); ties go to the lowest id."""
    ids: Tensor = _implementation(backend, logits).greedy(logits)
    return ids


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Draw an id [B] int64 from softmax(logits [B, V]) per row: argmax(logit - log(-log u)), ties to the lowest id.

    logits fp32, contiguous, divided by the temperature; excluded ids are -inf. u is the counter-based uniform number of
    (seeds[b], positions[b], id) as `kvferry_engine.wire.rng` defines it; seeds and positions [B] int64, the position being
    the index of the drawn token in prompt + output.
    """
    ids: Tensor = _implementation(backend, logits).gumbel_argmax(logits, seeds, positions)
    return ids


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Penalise seen ids of logits [B, V] fp32 (contiguous) in place.

    Ids of the prompt (prompt_mask [B, V] bool) or the output (output_counts [B, V] int32): a positive logit is divided by
    repetition [B], a negative one multiplied. Then ids of the output lose frequency [B] times their count, and
    presence [B]. Neutral values: 1, 0 and 0; all three fp32.
    """
    _implementation(backend, logits).apply_penalties(
        logits, prompt_mask, output_counts, presence, frequency, repetition
    )


def top_k_top_p_min_p(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, backend: Backend | None = None
) -> None:
    """Set excluded ids of logits [B, V] fp32 (contiguous, divided by the temperature) to -inf, in place.

    min_p [B] fp32 keeps ids of at least min_p times the largest probability (0: all). Then top_k [B] int32 keeps the k
    largest and whatever equals the k-th (below 1, or V and more: all). Then top_p [B] fp32 keeps an id while the strictly
    likelier ones, of what is left and renormalised, hold less than top_p (1 and more: all). The largest always stays.
    """
    _implementation(backend, logits).top_k_top_p_min_p(logits, top_k, top_p, min_p)


def _implementation(backend: Backend | None, tensor: Tensor) -> ModuleType:
    match choose(backend, tensor):
        case Backend.CPU:
            return cpu
        case Backend.REFERENCE:
            return reference
        case Backend.TRITON:
            from kvferry_kernels.sampler import triton

            return triton
