"""Rotary position tables for every rope type of Hugging Face configs, computed once per model.

The table is made for the longest sequence the engine admits. Rope types whose frequencies depend on the sequence length
(`dynamic`, `longrope`) are evaluated at that length for all positions, because a cached block must mean the same to every
sequence that reads it; up to the original context length this is what transformers computes, too.

Sources: RoFormer (arXiv 2104.09864); NTK-aware and YaRN scaling (arXiv 2309.00071); LongRoPE (arXiv 2402.13753); the
Llama 3.1 model card. Formulas are checked against `transformers.modeling_rope_utils` in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry_engine.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """What the rope formulas need besides the config's rope parameters. Lengths in tokens."""

    head_dim: int
    max_position: int
    max_model_len: int


Frequencies = tuple[Tensor, float]
"""Inverse frequencies fp32 [rotary_dim / 2] and the factor on cos and sin."""


def rope_type(rope: dict[str, Any]) -> str:
    """Return the rope type under either of its two spellings."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def inverse_frequencies(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    """Evaluate the rope parameters. Raises UnsupportedModelError for unknown types and missing parameters."""
    kind = rope_type(rope)
    formula = _FORMULAS.get(kind)
    if formula is None:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {', '.join(sorted(_FORMULAS))}")
    try:
        return formula(rope, shape)
    except KeyError as error:
        raise UnsupportedModelError(f"rope type {kind!r} needs the parameter {error} in the model's config") from error


def cos_sin_table(rope: dict[str, Any], shape: RopeShape, device: torch.device) -> Tensor:
    """Return fp32 [max_model_len, rotary_dim]: per position first the cosines, then the sines."""
    inv_freq, factor = inverse_frequencies(rope, shape)
    positions = torch.arange(shape.max_model_len, dtype=torch.float32)
    angles = positions[:, None] * inv_freq[None, :]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device)


def _rotary_dim(rope: dict[str, Any], shape: RopeShape) -> int:
    return int(shape.head_dim * (rope.get("partial_rotary_factor") or 1.0))


def _base(rope: dict[str, Any]) -> float:
    return float(rope.get("rope_theta") or 10_000.0)


def _geometric(base: float, dim: int, *, count: int | None = None) -> Tensor:
    """base ** -(2 i / dim) for the first `count` pairs (default dim / 2)."""
    pairs = torch.arange(0, 2 * count if count is not None else dim, 2, dtype=torch.float32)
    return 1.0 / (base ** (pairs / dim))


def _default(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    return _geometric(_base(rope), _rotary_dim(rope, shape)), 1.0


def _linear(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    return _geometric(_base(rope), _rotary_dim(rope, shape)) / rope["factor"], 1.0


def _dynamic(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    dim, factor = _rotary_dim(rope, shape), rope["factor"]
    length = max(shape.max_model_len, shape.max_position)
    stretch = factor * length / shape.max_position - (factor - 1)
    return _geometric(_base(rope) * stretch ** (dim / (dim - 2)), dim), 1.0


def _proportional(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    """The first share of the pairs rotates, the others have frequency 0; the exponent counts the whole head."""
    num_pairs = shape.head_dim // 2
    num_rotated = int((rope.get("partial_rotary_factor") or 1.0) * shape.head_dim // 2)
    rotated = _geometric(_base(rope), shape.head_dim, count=num_rotated)
    still = torch.zeros(num_pairs - num_rotated, dtype=torch.float32)
    return torch.cat((rotated, still)) / (rope.get("factor") or 1.0), 1.0


def _llama3(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    inv_freq = _geometric(_base(rope), _rotary_dim(rope, shape))
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = _original_context(rope, shape)
    wavelengths = 2 * math.pi / inv_freq
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = torch.where(wavelengths > context / low, inv_freq / factor, between)
    return torch.where(wavelengths < context / high, inv_freq, stretched), 1.0


def _longrope(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    dim, context = _rotary_dim(rope, shape), _original_context(rope, shape)
    scale = rope.get("factor") or shape.max_position / context
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0
    stretch = torch.tensor(
        rope["long_factor"] if shape.max_model_len > context else rope["short_factor"], dtype=torch.float32
    )
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (stretch * _base(rope) ** exponents), float(attention_factor)


def _yarn(rope: dict[str, Any], shape: RopeShape) -> Frequencies:
    dim, base, context = _rotary_dim(rope, shape), _base(rope), _original_context(rope, shape)
    factor = rope.get("factor") or shape.max_position / context
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    low, high = (dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inv_freq = ramp / (factor * kept) + (1 - ramp) / kept
    return inv_freq, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _original_context(rope: dict[str, Any], shape: RopeShape) -> int:
    return int(rope.get("original_max_position_embeddings") or shape.max_position)


_FORMULAS: dict[str, Callable[[dict[str, Any], RopeShape], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
