"""The draw is fixed by these numbers: change them and every seeded request in the world answers differently."""

from __future__ import annotations

from kvferry_engine.wire import rng


def test_mix64_is_the_splitmix64_finaliser() -> None:
    assert [rng.mix64(value) for value in (0, 1, 2)] == [0, 0x5692161D100B05E5, 0xDBD238973A2B148A]
    assert rng.mix64(1 << 64) == rng.mix64(0)


def test_draws_are_pinned() -> None:
    assert rng.uniform(1, 2, 3) == 0.3251505494117737
    assert rng.row_key(-1, 0) == rng.row_key((1 << 64) - 1, 0)


def test_uniform_never_reaches_its_ends() -> None:
    draws = [rng.uniform(seed, position, token) for seed in range(20) for position in range(20) for token in range(20)]

    assert min(draws) > 0.0
    assert max(draws) < 1.0
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
