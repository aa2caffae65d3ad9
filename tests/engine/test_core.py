"""The loop with a runner that needs no model: what was asked is what is sent, once, to whom it belongs."""

from __future__ import annotations

import pytest

from kit.core import Bench, expected_output
from kvferry_engine.kv_cache.auditor import audit
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.packing import pack_ids, unpack_ids


def slots_of(answer: wire.Accepted | wire.Rejected) -> list[int]:
    assert isinstance(answer, wire.Accepted), answer
    return answer.slots


@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_get_their_tokens_and_leave_nothing_behind(lookahead: int) -> None:
    bench = Bench(lookahead=lookahead)
    prompts = {f"r{i}": [(i * 7 + j) % 90 for j in range(3 + 20 * i)] for i in range(5)}
    slots = {rid: slots_of(bench.submit(rid, prompt, 30, seeds=(5, 6))) for rid, prompt in prompts.items()}

    bench.run()

    for rid, prompt in prompts.items():
        for slot, seed in zip(slots[rid], (5, 6), strict=True):
            ids, finish = bench.tokens(slot)
            assert ids == expected_output(prompt, seed, 30)
            assert finish is not None
            assert finish.reason is wire.FinishReason.LENGTH
    assert audit(bench.scheduler.pool, bench.index, bench.scheduler.sequences.values(), []) == []
    assert sorted(bench.runner.forgotten) == sorted(slot for each in slots.values() for slot in each)
    assert bench.core.requests() == []


def test_the_same_attempt_twice_is_one_request() -> None:
    bench = Bench()
    first = bench.submit("r", [1, 2, 3], 5)
    assert bench.submit("r", [1, 2, 3], 5) == first
    bench.run()

    assert bench.tokens(slots_of(first)[0])[0] == expected_output([1, 2, 3], 1, 5)


def test_a_newer_attempt_replaces_an_older_one_and_never_the_other_way_round() -> None:
    bench = Bench()
    old = slots_of(bench.submit("r", [1, 2, 3], 50))
    bench.core.turn()
    new = slots_of(bench.submit("r", [1, 2, 3], 50, attempt=1))
    stale = bench.submit("r", [1, 2, 3], 50)
    bench.run()

    assert isinstance(stale, wire.Rejected)
    assert stale.code is wire.RejectCode.STALE
    assert bench.tokens(new[0])[0] == expected_output([1, 2, 3], 1, 50)
    assert bench.tokens(old[0])[1] is None


def test_emitted_tokens_are_output_and_the_stream_goes_on_behind_them() -> None:
    bench = Bench()
    whole = expected_output([4, 5], 9, 40)
    slot = slots_of(bench.submit("r", [4, 5], 40, seeds=(9,), emitted=whole[:17]))[0]
    bench.run()

    assert bench.tokens(slot)[0] == whole[17:]


def test_an_aborted_request_frees_its_blocks_and_says_nothing_more() -> None:
    bench = Bench()
    slot = slots_of(bench.submit("r", list(range(50)), 100))[0]
    for _ in range(5):
        bench.core.turn()
    bench.core.abort("r", None)
    seen = len(bench.tokens(slot)[0])
    bench.run()

    assert len(bench.tokens(slot)[0]) == seen
    assert bench.runner.forgotten == [slot]
    assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_blocks
    bench.core.abort("never heard of", None)


def test_a_vanished_router_takes_its_requests_along() -> None:
    bench = Bench()
    bench.submit("a", [1], 100, origin="gone")
    kept = slots_of(bench.submit("b", [2], 20, origin="here"))[0]
    bench.core.turn()
    bench.core.abort_origin("gone")
    bench.run()

    assert [rid for _, rid, _ in bench.core.requests()] == []
    assert bench.tokens(kept, "here")[0] == expected_output([2], 1, 20)


def test_a_router_can_ask_again_for_what_it_missed() -> None:
    bench = Bench()
    bench.submit("r", [1, 2], 20)
    for _ in range(8):
        bench.core.turn()
    answer = bench.core.resume("router2", wire.Resume(rid="r", attempt=0, index=0, from_k=2))
    bench.run()
    later, finish = bench.tokens(answer.slot, "router2")

    assert answer.known
    assert unpack_ids(answer.token_ids) + later == expected_output([1, 2], 1, 20)[2:]
    assert finish is not None


def test_a_finished_request_is_remembered_for_ten_seconds() -> None:
    bench = Bench()
    bench.submit("r", [1, 2], 20)
    bench.run()
    request = wire.Resume(rid="r", attempt=0, index=0, from_k=0)
    answer = bench.core.resume("router", request)
    bench.now = 11.0
    bench.core.turn()

    assert answer.known
    assert unpack_ids(answer.token_ids) == expected_output([1, 2], 1, 20)
    assert answer.finish is not None
    assert not bench.core.resume("router", request).known


@pytest.mark.parametrize(
    ("prompt", "count", "code"),
    [([], 5, wire.RejectCode.INVALID), ([1000], 5, wire.RejectCode.INVALID), ([1] * 300, 5, wire.RejectCode.INVALID)],
)
def test_what_can_never_run_is_refused_with_a_reason(prompt: list[int], count: int, code: wire.RejectCode) -> None:
    answer = Bench().submit("r", prompt, count)

    assert isinstance(answer, wire.Rejected)
    assert answer.code is code
    assert answer.message


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_sequences_need_indices_of_their_own(seeds: tuple[int, ...]) -> None:
    bench = Bench()
    message = wire.Submit(
        rid="r",
        attempt=0,
        engine_boot="b",
        prompt_ids=pack_ids([1]),
        sequences=[wire.SubmitSequence(index=0, seed=seed) for seed in seeds],
        sampling=wire.Sampling(max_tokens=1),
    )

    answer = bench.core.submit("router", message)

    assert isinstance(answer, wire.Rejected)
    bench.core.abort_origin("router")
    assert bench.core.requests() == []


def test_sequences_that_are_over_already_are_accepted_and_finished() -> None:
    bench = Bench()
    slots = slots_of(bench.submit("r", [4, 5], 3, seeds=(9, 10), emitted=expected_output([4, 5], 9, 3)))
    bench.run()

    assert len(slots) == 2
    assert all(bench.tokens(slot)[1] is not None for slot in slots)


def test_a_torn_id_column_is_refused() -> None:
    message = wire.Submit(
        rid="r",
        attempt=0,
        engine_boot="b",
        prompt_ids=b"abc",
        sequences=[wire.SubmitSequence(index=0, seed=1)],
        sampling=wire.Sampling(max_tokens=1),
    )

    answer = Bench().core.submit("router", message)

    assert isinstance(answer, wire.Rejected)
    assert answer.code is wire.RejectCode.INVALID


def test_a_full_queue_is_busy_and_a_draining_engine_refuses() -> None:
    bench = Bench(max_queued=2)
    assert isinstance(bench.submit("a", [1], 5, seeds=(1, 2)), wire.Accepted)
    busy = bench.submit("b", [1], 5)
    bench.core.is_draining = True
    draining = bench.submit("c", [1], 5)

    assert isinstance(busy, wire.Rejected)
    assert busy.code is wire.RejectCode.BUSY
    assert busy.retry_after_s > 0
    assert isinstance(draining, wire.Rejected)
    assert draining.code is wire.RejectCode.DRAINING


def test_a_request_past_its_deadline_ends_with_a_word() -> None:
    bench = Bench()
    slot = slots_of(bench.submit("r", [1], 200, remaining_s=1.0))[0]
    bench.core.turn()
    bench.now = 2.0
    bench.run()

    finish = bench.tokens(slot)[1]
    assert finish is not None
    assert finish.reason is wire.FinishReason.ABORT
