"""A pair is wedged when its oldest payload does not come, not when the wire or this engine is slow."""

from __future__ import annotations

from kvferry_engine.transfer.protocol.watch import PayloadWatch


def test_a_silent_pair_stalls_after_several_looks() -> None:
    watch = PayloadWatch(2.0)
    watch.announced(0, 0.0)

    looks = [watch.is_stalled(0.5 * n) for n in range(1, 5)]

    assert looks == [False, False, False, True]


def test_a_long_step_here_is_not_the_peers_fault() -> None:
    watch = PayloadWatch(2.0)
    watch.announced(0, 0.0)

    assert not watch.is_stalled(60.0)


def test_a_slow_wire_that_keeps_bringing_is_not_wedged() -> None:
    watch = PayloadWatch(2.0)
    for number in range(4):
        watch.announced(number, 0.0)
    now = 0.0
    for number in range(4):
        for _ in range(3):
            now += 0.5
            assert not watch.is_stalled(now)
        watch.arrived(number, now)

    assert watch.next_timer_s() is None


def test_payloads_behind_a_lost_one_do_not_hide_it() -> None:
    watch = PayloadWatch(1.0)
    watch.announced(0, 0.0)
    watch.announced(1, 0.0)
    watch.is_stalled(0.5)

    watch.arrived(1, 0.6)

    assert watch.is_stalled(1.0)
