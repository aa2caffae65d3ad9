"""Routing decisions as tables: costs, disaggregation, policies, admission, load book."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvferry_engine.wire.messages import Load, Role
from kvferry_server.routing import cost
from kvferry_server.routing.admission import MAX_RETRY_S, QueueFullError, QueueLimits, admit, num_queued
from kvferry_server.routing.disaggregation import MIN_REMOTE_TOKENS, Reason, ferryable_tokens, plan_prefill
from kvferry_server.routing.load_book import LoadBook, LoadView
from kvferry_server.routing.policies import Candidate, make_policy
from kvferry_server.routing.snapshot import EngineSnapshot, RoutedRequest
from kvferry_server.settings import Disaggregation, RoutingPolicy

RATE = 1000.0


def engine(name: str, *, role: Role = Role.BOTH, cached: int = 0, **load: Any) -> EngineSnapshot:
    load.setdefault("prefill_tokens_per_s", RATE)
    load.setdefault("transfer_bytes_per_s", 1e9)
    return EngineSnapshot(
        boot=f"boot-{name}",
        name=name,
        address=f"{name}:7070",
        role=role,
        kv_bytes_per_token=1000,
        max_num_seqs=8,
        load=LoadView(**load),
        cached_tokens=cached,
    )


def request(num_prompt_tokens: int = 1000, **changes: Any) -> RoutedRequest:
    return RoutedRequest(num_prompt_tokens=num_prompt_tokens, **changes)


def best(policy: RoutingPolicy, engines: list[EngineSnapshot], routed: RoutedRequest) -> str:
    candidates = [Candidate(engine=e, plan=plan_prefill(e, [], routed, mode=Disaggregation.NEVER)) for e in engines]
    return make_policy(policy, random.Random(0)).order(candidates, routed)[0].engine.name


@pytest.mark.parametrize(
    ("engines", "name"),
    [
        ([engine("cold"), engine("warm", cached=960)], "warm"),
        ([engine("idle"), engine("queued", waiting_tokens=5000)], "idle"),
        ([engine("idle"), engine("warm but queued", cached=960, waiting_tokens=2000)], "idle"),
        ([engine("slow"), engine("fast", prefill_tokens_per_s=4000.0)], "fast"),
        ([engine("busy", num_running=6, decode_step_s=0.02), engine("idle", decode_step_s=0.02)], "idle"),
        (
            [engine("full", num_running=8, decode_step_s=0.01), engine("seats", num_running=7, decode_step_s=0.01)],
            "seats",
        ),
        ([engine("one", num_running=3), engine("two", num_running=2)], "two"),
        (
            [engine("no room", used_blocks=99, free_blocks=3, decode_step_s=0.01), engine("room", decode_step_s=0.01)],
            "room",
        ),
    ],
)
def test_kv_aware_takes_the_shortest_estimated_time(engines: list[EngineSnapshot], name: str) -> None:
    assert best(RoutingPolicy.KV_AWARE, engines, request()) == name
    assert best(RoutingPolicy.KV_AWARE, engines[::-1], request()) == name


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_roles_rank_but_exclude_nobody(policy: RoutingPolicy) -> None:
    prefill = engine("p", role=Role.PREFILL, cached=960)
    busy = engine("d", role=Role.DECODE, num_running=7, waiting_tokens=9000)
    assert best(policy, [prefill, busy], request(session_id="s")) == "d"
    assert best(policy, [prefill], request(session_id="s")) == "p"


def test_least_load_counts_sequences_per_seat() -> None:
    engines = [engine("a", num_running=3), engine("b", num_running=1, num_pending=1), engine("c", num_waiting=3)]
    assert best(RoutingPolicy.LEAST_LOAD, engines, request()) == "b"


def test_round_robin_takes_turns() -> None:
    policy = make_policy(RoutingPolicy.ROUND_ROBIN, random.Random(0))
    routed = request()
    plan = plan_prefill(engine("x"), [], routed, mode=Disaggregation.NEVER)
    candidates = [Candidate(engine=engine(name), plan=plan) for name in "cab"]
    assert [policy.order(candidates, routed)[0].engine.name for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_a_session_stays_and_only_those_of_a_lost_engine_move() -> None:
    engines = [engine(name) for name in "abcd"]
    sessions = [f"session {number}" for number in range(100)]
    homes = {s: best(RoutingPolicy.SESSION, engines, request(session_id=s)) for s in sessions}
    after = {s: best(RoutingPolicy.SESSION, engines[1:], request(session_id=s)) for s in sessions}
    assert set(homes.values()) == {"a", "b", "c", "d"}
    assert all(after[s] == homes[s] for s in sessions if homes[s] != "a")


def test_without_a_session_the_least_loaded_engine_is_taken() -> None:
    assert best(RoutingPolicy.SESSION, [engine("a", num_running=2), engine("b")], request()) == "b"


P = engine("p", role=Role.PREFILL)
BUSY_P = engine("p", role=Role.PREFILL, waiting_tokens=9000)


@pytest.mark.parametrize(
    ("receiver", "senders", "tokens", "mode", "reason", "remote"),
    [
        (engine("d"), [P], 31, Disaggregation.ALWAYS, Reason.SHORT, False),
        (engine("d"), [P], 32, Disaggregation.ALWAYS, Reason.SHORT, False),
        (engine("d"), [P], 33, Disaggregation.ALWAYS, Reason.ALWAYS, True),
        (engine("d", cached=992), [P], 1000, Disaggregation.ALWAYS, Reason.CACHED, False),
        (engine("d"), [], 1000, Disaggregation.ALWAYS, Reason.NO_PREFILL_ENGINE, False),
        (engine("d"), [P], 1000, Disaggregation.NEVER, Reason.NEVER, False),
        (engine("d"), [P], MIN_REMOTE_TOKENS, Disaggregation.AUTO, Reason.SHORT, False),
        (engine("d", cached=800), [P], 1000, Disaggregation.AUTO, Reason.SHORT, False),
        (engine("d"), [P], 1000, Disaggregation.AUTO, Reason.COST, False),
        (engine("d", num_running=4), [P], 1000, Disaggregation.AUTO, Reason.COST, True),
        (engine("d", waiting_tokens=500), [P], 1000, Disaggregation.AUTO, Reason.COST, True),
        (
            engine("d", num_running=4),
            [BUSY_P],
            1000,
            Disaggregation.AUTO,
            Reason.COST,
            False,
        ),
        (engine("d"), [engine("p", role=Role.PREFILL, cached=992)], 1000, Disaggregation.AUTO, Reason.COST, True),
        (
            engine("d"),
            [engine("d2", role=Role.DECODE, cached=992)],
            1000,
            Disaggregation.AUTO,
            Reason.NO_PREFILL_ENGINE,
            False,
        ),
        (engine("d"), [engine("e", cached=992)], 1000, Disaggregation.AUTO, Reason.COST, True),
        (engine("d"), [engine("d")], 1000, Disaggregation.AUTO, Reason.NO_PREFILL_ENGINE, False),
    ],
)
def test_where_a_prompt_is_computed(
    receiver: EngineSnapshot,
    senders: list[EngineSnapshot],
    tokens: int,
    mode: Disaggregation,
    reason: Reason,
    remote: bool,
) -> None:
    plan = plan_prefill(receiver, senders, request(tokens), mode=mode)
    assert (plan.reason, plan.remote) == (reason, remote)


def test_slow_transfers_keep_prompts_local() -> None:
    receiver = engine("d", num_running=4, transfer_bytes_per_s=1e5)
    assert not plan_prefill(receiver, [P], request(), mode=Disaggregation.AUTO).remote


def test_prompt_log_probs_are_always_local() -> None:
    plan = plan_prefill(engine("d"), [P], request(needs_local_prefill=True), mode=Disaggregation.ALWAYS)
    assert (plan.reason, plan.remote) == (Reason.PROMPT_LOGPROBS, False)


def test_only_engines_of_equal_pair_hash_are_hinted() -> None:
    other = EngineSnapshot(boot="o", name="o", address="o:1", role=Role.PREFILL, pair_hash="other")
    assert plan_prefill(engine("d"), [other], request(), mode=Disaggregation.ALWAYS).reason is Reason.NO_PREFILL_ENGINE


def test_hints_are_ranked_prefill_role_first_then_by_time() -> None:
    senders = [
        engine("both", cached=992),
        engine("p slow", role=Role.PREFILL, waiting_tokens=900),
        engine("p warm", role=Role.PREFILL, cached=960),
        engine("p cold", role=Role.PREFILL),
    ]
    plan = plan_prefill(engine("d"), senders, request(), mode=Disaggregation.ALWAYS)
    assert [hint.address for hint in plan.hints] == ["p warm:7070", "p cold:7070", "p slow:7070"]
    assert plan.hints[0].cached_tokens == 960


@pytest.mark.parametrize("mode", list(Disaggregation))
def test_a_handoff_ferries_from_the_draining_engine_in_every_mode(mode: Disaggregation) -> None:
    draining = engine("old", role=Role.DECODE, cached=1000)
    plan = plan_prefill(engine("d"), [P], request(), mode=mode, handoff_from=draining)
    assert (plan.reason, [hint.boot for hint in plan.hints]) == (Reason.HANDOFF, ["boot-old"])


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_at_least_one_token_stays_for_the_receiver(tokens: int, expected: int) -> None:
    assert ferryable_tokens(tokens, 32) == expected


def test_unknown_rates_have_defaults() -> None:
    unknown = engine("a", prefill_tokens_per_s=0.0, transfer_bytes_per_s=0.0)
    assert cost.prefill_rate(unknown) == cost.ASSUMED_PREFILL_TOKENS_PER_S
    assert cost.transfer_s(unknown, unknown, 1000) == pytest.approx(1e6 / cost.ASSUMED_TRANSFER_BYTES_PER_S)


@pytest.mark.parametrize(
    ("load", "queued"),
    [
        ({"num_running": 8, "num_waiting": 2}, 2),
        ({"num_running": 8, "num_waiting": 2, "num_pending": 3}, 5),
        ({"num_running": 4, "num_pending": 3}, 0),
        ({"num_running": 6, "num_pending": 3}, 1),
    ],
)
def test_queued_counts_reported_ones_and_those_without_a_seat(load: dict[str, int], queued: int) -> None:
    assert num_queued(engine("a", **load)) == queued


@pytest.mark.parametrize(
    ("waiting", "num_sequences", "limits", "refused"),
    [
        (0, 1, QueueLimits(max_queued_requests=1), False),
        (1, 1, QueueLimits(max_queued_requests=1), True),
        (5, 1, QueueLimits(), False),
        (0, 3, QueueLimits(max_queued_requests=2), True),
        (2, 1, QueueLimits(max_queued_tokens=2000), True),
        (1, 1, QueueLimits(max_queued_tokens=2000), False),
    ],
)
def test_admission(waiting: int, num_sequences: int, limits: QueueLimits, refused: bool) -> None:
    full = engine("a", num_running=8, num_waiting=waiting, waiting_tokens=1000 * waiting)
    if refused:
        with pytest.raises(QueueFullError) as caught:
            admit([full], num_sequences=num_sequences, limits=limits)
        assert caught.value.status == 429
        assert caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= MAX_RETRY_S
    else:
        admit([full], num_sequences=num_sequences, limits=limits)


def test_a_request_with_a_free_seat_is_never_refused_by_the_request_limit() -> None:
    engines = [engine("full", num_running=8, num_waiting=50), engine("free", num_running=2)]
    admit(engines, num_sequences=1, limits=QueueLimits(max_queued_requests=10))


def test_retry_after_follows_the_shortest_queue() -> None:
    engines = [engine("a", num_running=8, waiting_tokens=9000), engine("b", num_running=8, waiting_tokens=5000)]
    with pytest.raises(QueueFullError) as caught:
        admit(engines, num_sequences=1, limits=QueueLimits(max_queued_tokens=1))
    assert caught.value.retry_after_s == 5.0


def test_what_was_sent_counts_until_a_report_after_its_acceptance() -> None:
    book = LoadBook()
    book.reported("e", Load(num_running=1, waiting_tokens=10))
    book.submitted("e", "r", num_sequences=2, tokens=100)
    book.reported("e", Load(num_running=1, waiting_tokens=10))
    assert (book.view("e").num_pending, book.view("e").waiting_tokens) == (2, 110)
    book.accepted("e", "r")
    book.reported("e", Load(num_running=3, waiting_tokens=110))
    assert (book.view("e").num_pending, book.view("e").waiting_tokens, book.num_mine("e")) == (0, 110, 2)
    book.released("e", "r")
    assert book.num_mine("e") == 0


def test_a_burst_between_two_reports_spreads() -> None:
    book = LoadBook()
    counts = {"a": 0, "b": 0}
    for number in range(10):
        engines = [
            EngineSnapshot(boot=name, name=name, address=name, load=book.view(name), max_num_seqs=8)
            for name in ("a", "b")
        ]
        name = best(RoutingPolicy.KV_AWARE, engines, request(100))
        counts[name] += 1
        book.submitted(name, str(number), num_sequences=1, tokens=100)
    assert counts == {"a": 5, "b": 5}
