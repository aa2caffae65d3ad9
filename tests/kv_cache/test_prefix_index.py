"""Block hash to block, and the change stream routers follow."""

from __future__ import annotations

from kvferry_engine.kv_cache.prefix_index import PrefixIndex

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))


def test_lookup_returns_the_longest_leading_run() -> None:
    index = PrefixIndex()
    index.insert(ONE, 5)
    index.insert(THREE, 7)

    assert index.lookup([ONE, TWO, THREE]) == [5]
    assert index.lookup([TWO]) == []
    assert index.lookup([ONE, THREE]) == [5, 7]


def test_the_first_block_with_a_content_stays() -> None:
    index = PrefixIndex()

    assert index.insert(ONE, 5)
    assert not index.insert(ONE, 6)

    assert index.get(ONE) == 5


def test_events_are_net_changes_since_the_last_drain() -> None:
    index = PrefixIndex()
    index.insert(ONE, 1)
    index.insert(TWO, 2)
    index.remove(TWO)
    assert index.drain_events() == (ONE, b"")

    index.remove(ONE)
    index.insert(THREE, 3)
    index.insert(ONE, 4)

    assert index.drain_events() == (THREE, b"")
    assert index.drain_events() == (b"", b"")


def test_clear_removes_everything_and_says_so() -> None:
    index = PrefixIndex()
    index.insert(ONE, 1)
    index.insert(TWO, 2)
    index.drain_events()

    index.clear()

    assert len(index) == 0
    assert index.drain_events() == (b"", ONE + TWO)


def test_a_snapshot_is_everything_stored() -> None:
    index = PrefixIndex()
    index.insert(ONE, 1)
    index.insert(TWO, 2)
    index.remove(ONE)
    index.remove(THREE)

    assert index.snapshot() == TWO
