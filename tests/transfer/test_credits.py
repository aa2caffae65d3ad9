"""Staging slots are never promised twice, and every pair with work gets one sooner or later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry_engine.transfer.protocol.credits import CreditPool

PAIRS = ["a", "b", "c", "d", "e"]


@given(
    num_slots=st.integers(1, 9),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["grant", "consume", "release", "give_back", "drop"]),
            st.sets(st.sampled_from(PAIRS), min_size=1),
        ),
        max_size=60,
    ),
)
def test_promises_never_exceed_slots(num_slots: int, operations: list[tuple[str, set[str]]]) -> None:
    pool: CreditPool[str] = CreditPool(num_slots)
    held = dict.fromkeys(PAIRS, 0)
    used = dict.fromkeys(PAIRS, 0)
    for operation, pairs in operations:
        pair = min(pairs)
        match operation:
            case "grant":
                for its, count in pool.grant(sorted(pairs)):
                    assert count > 0
                    held[its] += count
            case "consume":
                assert pool.consume(pair) == (held[pair] > 0)
                if held[pair]:
                    held[pair] -= 1
                    used[pair] += 1
            case "release" if used[pair]:
                pool.release(pair)
                used[pair] -= 1
            case "give_back":
                pool.give_back(pair, held[pair])
                held[pair] = 0
            case "drop":
                pool.drop(pair)
                held[pair] = 0
        assert pool.num_free == num_slots - sum(held.values()) - sum(used.values()) >= 0


def test_a_newcomer_finds_room_beside_a_slow_pair() -> None:
    pool: CreditPool[str] = CreditPool(8)
    pool.grant(["slow"])

    given_now = dict(pool.grant(["slow", "new"]))

    assert given_now["new"] >= 1


def test_the_only_slot_goes_round() -> None:
    pool: CreditPool[str] = CreditPool(1)
    turns = []
    for _ in range(4):
        ((pair, count),) = pool.grant([p for p in ("a", "b") if not turns or p != turns[-1]])
        assert count == 1
        turns.append(pair)
        assert pool.consume(pair)
        assert pool.grant(["a", "b"]) == []
        pool.release(pair)

    assert set(turns) == {"a", "b"}
