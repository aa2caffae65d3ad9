"""Requests on engines that work: events, several sequences, stop, abort, rejections, slow readers."""

from __future__ import annotations

import asyncio

import pytest

from kvferry_engine.wire.messages import Abort, FinishReason, RejectCode, Rejected, Role, Sampling, Submit
from kvferry_engine.wire.packing import unpack_ids
from kvferry_server.errors import (
    BadRequestError,
    NotImplementedByModelError,
    ServiceUnavailableError,
    TooManyRequestsError,
)
from kvferry_server.requests import TokenEvent
from kvferry_server.settings import Disaggregation, OnPrefillUnavailable
from server.kit_engine import FakeEngine, collect, in_background, model_info, running, tokens_of, until


def rejected(code: RejectCode, *, param: str | None = None, retry_after_s: float = 0.0) -> Rejected:
    return Rejected(rid="", attempt=0, code=code, message="because", param=param, retry_after_s=retry_after_s)


async def test_a_request_yields_its_tokens_its_report_and_a_finish() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(seeds=[5], max_tokens=10))
        assert generation.decode_engine == "a"
        events = [event async for event in generation.events()]
        await generation.aclose()
        assert [token for event in events for token in event.token_ids] == tokens_of(5, 10)
        assert events[0].report is not None and events[0].report.num_prompt_tokens == 3
        assert events[-1].finish is not None and events[-1].finish.reason is FinishReason.LENGTH
        assert router.core.dispatcher.num_in_flight == 0


async def test_a_finished_request_is_not_aborted() -> None:
    async with running(FakeEngine("a")) as router:
        await collect(await router.core.dispatcher.submit(router.request()))
        await asyncio.sleep(0.02)
        assert router.engines[0].got(Abort) == []


async def test_sequences_of_one_request_stay_apart() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(seeds=[1, 2, 3], max_tokens=7))
        assert await collect(generation) == {index: tokens_of(index + 1, 7) for index in range(3)}


async def test_log_probs_travel_with_their_tokens() -> None:
    async with running(FakeEngine("a")) as router:
        sampling = Sampling(max_tokens=6, logprobs=0)
        generation = await router.core.dispatcher.submit(router.request(seeds=[4], sampling=sampling))
        events = [event async for event in generation.events()]
        chosen = [unpack_ids(entry.ids)[0] for event in events for entry in event.logprobs or []]
        assert chosen == tokens_of(4, 6)


async def test_two_hundred_requests_at_once_share_the_engines() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:

        async def one(seed: int) -> list[int]:
            return (await collect(await router.core.dispatcher.submit(router.request(seeds=[seed]))))[0]

        outputs = await asyncio.gather(*(one(seed) for seed in range(200)))
        assert outputs == [tokens_of(seed, 20) for seed in range(200)]
        shares = [len(engine.got(Submit)) for engine in router.engines]
        assert sum(shares) == 200 and min(shares) >= 60
        assert router.core.dispatcher.num_in_flight == 0
        assert [router.core.dispatcher.num_on(engine.boot) for engine in router.engines] == [0, 0]


async def test_a_stopped_sequence_ends_alone_and_is_aborted_by_index() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(seeds=[1, 2], max_tokens=50))
        lengths = {0: 0, 1: 0}
        async for event in generation.events():
            lengths[event.index] += len(event.token_ids)
            if event.index == 0 and lengths[0] >= 3:
                await generation.stop(0)
        assert lengths[1] == 50
        assert lengths[0] < 50
        assert [abort.indices for abort in router.engines[0].got(Abort)] == [[0]]
        assert router.core.dispatcher.num_in_flight == 0


async def test_closing_a_generation_aborts_it_at_the_engine() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(max_tokens=100_000))
        async for _ in generation.events():
            break
        await generation.aclose()
        await until(lambda: not router.engines[0].sequences)
        assert router.core.dispatcher.num_in_flight == 0
        assert [event async for event in generation.events()] == []


async def test_cancelling_submit_aborts_at_the_engine() -> None:
    async with running(FakeEngine("a")) as router:
        router.engines[0].script.silent = True
        submitting = in_background(router.core.dispatcher.submit(router.request()))
        await until(lambda: router.engines[0].got(Submit))
        submitting.cancel()
        await until(lambda: router.engines[0].got(Abort))
        assert router.core.dispatcher.num_in_flight == 0


async def test_abort_by_client_id_finishes_with_reason_abort() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(rid="mine", max_tokens=100_000))
        assert router.core.dispatcher.abort(["mine", "other"]) == ["mine"]
        events = [event async for event in generation.events()]
        assert events[-1].finish is not None and events[-1].finish.reason is FinishReason.ABORT
        await until(lambda: not router.engines[0].sequences)


async def test_equal_client_ids_do_not_collide() -> None:
    async with running(FakeEngine("a")) as router:
        first = await router.core.dispatcher.submit(router.request(rid="same", seeds=[1]))
        second = await router.core.dispatcher.submit(router.request(rid="same", seeds=[2]))
        outputs = await asyncio.gather(collect(first), collect(second))
        assert outputs == [{0: tokens_of(1, 20)}, {0: tokens_of(2, 20)}]


async def test_a_slow_reader_gets_everything_in_few_events_and_delays_nobody() -> None:
    async with running(FakeEngine("a")) as router:
        slow = await router.core.dispatcher.submit(router.request(seeds=[1], max_tokens=60))
        fast = await router.core.dispatcher.submit(router.request(seeds=[2], max_tokens=60))
        assert await collect(fast) == {0: tokens_of(2, 60)}
        await until(lambda: not router.engines[0].open_sequences)
        events: list[TokenEvent] = [event async for event in slow.events()]
        assert [token for event in events for token in event.token_ids] == tokens_of(1, 60)
        assert len(events) <= 2


async def test_a_busy_engine_is_passed_over() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        router.engines[0].script.reject = rejected(RejectCode.BUSY)
        for _ in range(4):
            generation = await router.core.dispatcher.submit(router.request())
            assert generation.decode_engine == "b"
            await generation.aclose()


async def test_all_engines_busy_is_503_with_the_shortest_retry_after() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        router.engines[0].script.reject = rejected(RejectCode.BUSY, retry_after_s=7)
        router.engines[1].script.reject = rejected(RejectCode.BUSY, retry_after_s=3)
        with pytest.raises(ServiceUnavailableError) as caught:
            await router.core.dispatcher.submit(router.request())
        assert caught.value.retry_after_s == 3
        assert router.core.stats.rejections["busy"] == 2
        assert router.core.dispatcher.num_in_flight == 0


async def test_an_invalid_request_is_400_with_its_field() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        for engine in router.engines:
            engine.script.reject = rejected(RejectCode.INVALID, param="response_format")
        with pytest.raises(BadRequestError) as caught:
            await router.core.dispatcher.submit(router.request())
        assert (caught.value.message, caught.value.param) == ("because", "response_format")
        assert sum(len(engine.got(Submit)) for engine in router.engines) == 1


async def test_a_missing_feature_is_501() -> None:
    async with running(FakeEngine("a")) as router:
        router.engines[0].script.reject = rejected(RejectCode.UNSUPPORTED)
        with pytest.raises(NotImplementedByModelError):
            await router.core.dispatcher.submit(router.request())


async def test_an_engine_that_does_not_answer_is_passed_over_and_told_to_forget() -> None:
    async with running(
        FakeEngine("a", role=Role.DECODE), FakeEngine("b", role=Role.PREFILL), submit_timeout=0.6
    ) as router:
        router.engines[0].script.silent = True
        generation = await router.core.dispatcher.submit(router.request())
        assert generation.decode_engine == "b"
        await until(lambda: router.engines[0].got(Abort))
        await generation.aclose()


async def test_no_engine_is_503() -> None:
    async with running(FakeEngine("a"), start=False, usable=0) as router:
        with pytest.raises(ServiceUnavailableError) as caught:
            await router.core.dispatcher.submit(router.request())
        assert caught.value.retry_after_s is not None
        assert router.core.dispatcher.model() is None


async def test_over_the_queue_limit_is_429_with_retry_after() -> None:
    engine = FakeEngine("a", info=model_info(max_num_seqs=2))
    async with running(engine, max_queued_requests=3) as router:
        engine.script.hold = True
        started = [await router.core.dispatcher.submit(router.request()) for _ in range(5)]
        with pytest.raises(TooManyRequestsError) as caught:
            await router.core.dispatcher.submit(router.request())
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
        assert router.core.stats.refusals["max_num_queued_reqs"] == 1
        for generation in started:
            await generation.aclose()


async def test_mode_always_sends_the_prefill_engine_as_hint() -> None:
    async with running(
        FakeEngine("d", role=Role.DECODE), FakeEngine("p", role=Role.PREFILL), disaggregation=Disaggregation.ALWAYS
    ) as router:
        prompt = list(range(100))
        generation = await router.core.dispatcher.submit(router.request(prompt_ids=prompt))
        submit = router.engines[0].got(Submit)[0]
        assert generation.decode_engine == "d"
        assert submit.force_remote
        assert [hint.boot for hint in submit.prefill_hints] == [router.engines[1].boot]
        await generation.aclose()


async def test_without_prefill_engines_a_router_told_to_reject_answers_503() -> None:
    async with running(
        FakeEngine("d", role=Role.DECODE),
        disaggregation=Disaggregation.ALWAYS,
        on_prefill_unavailable=OnPrefillUnavailable.REJECT,
    ) as router:
        with pytest.raises(ServiceUnavailableError):
            await router.core.dispatcher.submit(router.request(prompt_ids=list(range(100))))
        generation = await router.core.dispatcher.submit(router.request(prompt_ids=[1, 2]))
        await generation.aclose()


async def test_the_time_left_goes_to_the_engine() -> None:
    async with running(FakeEngine("a")) as router:
        generation = await router.core.dispatcher.submit(router.request(timeout_s=30.0))
        submit = router.engines[0].got(Submit)[0]
        assert 29 < submit.remaining_s <= 30
        await generation.aclose()


async def test_the_model_is_known_while_engines_are_connected() -> None:
    async with running(FakeEngine("a")) as router:
        router.engines[0].cordoned = True
        await until(lambda: not router.core.registry.usable())
        assert router.core.dispatcher.model() is not None
        await router.engines[0].crash()
        await until(lambda: router.core.dispatcher.model() is None)
