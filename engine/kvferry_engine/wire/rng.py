"""The counter-based random draw that makes a sampled token depend on seed and position only.

Every device, every engine and every resumed request computes the same draw: the constants and the test vectors live here,
`kvferry_engine.sampling` and the Triton sampler repeat the arithmetic on tensors.

``u = ((mix64(mix64(seed + K1 * (position + 1)) + K2 * token_id) >> 41) + 0.5) * 2**-23``, and the token drawn is
``argmax(logit / temperature - log(-log(u)))`` (Gumbel-max). 23 bits, since with 24 the largest value rounds to 1 in fp32.
mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

MASK64 = (1 << 64) - 1
K1 = 0x9E3779B97F4A7C15
K2 = 0xD1B54A32D192ED03
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
UNIFORM_SHIFT = 41
UNIFORM_SCALE = 2.0**-23


def mix64(value: int) -> int:
    """Return the SplitMix64 finaliser of `value` modulo 2**64."""
    z = value & MASK64
    z = ((z ^ (z >> 30)) * MIX_A) & MASK64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK64
    return z ^ (z >> 31)


def row_key(seed: int, position: int) -> int:
    """Return the 64-bit key of one sampled position; `position` counts the sampled token within prompt + output."""
    return mix64((seed & MASK64) + K1 * (position + 1))


def uniform(seed: int, position: int, token_id: int) -> float:
    """Return the uniform number in (0, 1) for one candidate token, exact in fp32."""
    return ((mix64(row_key(seed, position) + K2 * token_id) >> UNIFORM_SHIFT) + 0.5) * UNIFORM_SCALE
