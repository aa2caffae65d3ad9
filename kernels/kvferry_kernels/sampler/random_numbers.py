"""The constants of the counter-based draw, repeated from `kvferry_engine.wire.rng` since kernels import torch and triton only.

A test holds the two equal. Signed forms are what int64 tensors take; the arithmetic wraps modulo 2**64 either way.
"""

from __future__ import annotations

K1 = 0x9E3779B97F4A7C15
K2 = 0xD1B54A32D192ED03
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
UNIFORM_SHIFT = 41
UNIFORM_SCALE = 2.0**-23


def signed(value: int) -> int:
    """Return an unsigned 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
