"""Engines that die, freeze, drain, forget or repeat themselves: the client sees the same tokens, once each."""

from __future__ import annotations

import asyncio

import pytest

from kvferry_engine.wire.messages import (
    Abort,
    Finish,
    FinishReason,
    Handoff,
    RejectCode,
    Rejected,
    Resume,
    Sampling,
    Step,
    Submit,
)
from kvferry_engine.wire.packing import pack_ids, unpack_ids
from kvferry_server.engines.client import EngineState
from kvferry_server.errors import EngineFailedError
from kvferry_server.requests import Generation
from kvferry_server.routing.stats import MoveCause
from server.kit_engine import FakeEngine, Harness, collect, in_background, model_info, running, tokens_of, until

LONG = 400


async def begin(
    router: Harness, *, max_tokens: int = LONG, seeds: list[int] | None = None
) -> tuple[Generation, FakeEngine, FakeEngine]:
    """Start a request; return it with the engine that runs it and another one."""
    generation = await router.core.dispatcher.submit(router.request(seeds=seeds or [9], max_tokens=max_tokens))
    here = next(engine for engine in router.engines if engine.name == generation.decode_engine)
    other = next((engine for engine in router.engines if engine is not here), here)
    return generation, here, other


def num_emitted(engine: FakeEngine) -> int:
    return max((len(sequence.emitted) for sequence in engine.sequences.values()), default=0)


async def test_death_in_the_middle_continues_elsewhere_with_the_same_tokens() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router, seeds=[9, 10])
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 20)
        await here.crash()
        assert await reading == {0: tokens_of(9, LONG), 1: tokens_of(10, LONG)}
        assert generation.decode_engine == other.name
        submit = other.got(Submit)[0]
        assert submit.attempt == 2
        emitted = unpack_ids(submit.sequences[0].emitted_ids)
        assert len(emitted) >= 10 and emitted == tokens_of(9, len(emitted))
        assert router.core.stats.moves[MoveCause.DEATH] == 1


async def test_a_sequence_that_is_finished_or_stopped_is_not_submitted_again() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router, seeds=[1, 2, 3])
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 5)
        await generation.stop(1)
        await here.crash()
        output = await reading
        assert [sequence.index for sequence in other.got(Submit)[0].sequences] == [0, 2]
        assert (output[0], output[2]) == (tokens_of(1, LONG), tokens_of(3, LONG))


async def test_a_lost_connection_to_a_living_engine_is_resumed_in_place() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 20)
        await here.cut()
        assert await reading == {0: tokens_of(9, LONG)}
        assert generation.decode_engine == here.name
        assert other.got(Submit) == []
        assert len(here.got(Submit)) == 1
        assert here.got(Resume)


async def test_a_resume_with_log_probs_is_a_new_submission() -> None:
    async with running(FakeEngine("a")) as router:
        sampling = Sampling(max_tokens=LONG, logprobs=1)
        generation = await router.core.dispatcher.submit(router.request(seeds=[9], sampling=sampling))
        events = []

        async def read() -> None:
            async for event in generation.events():
                events.append(event)

        reading = in_background(read())
        here = router.engines[0]
        await until(lambda: num_emitted(here) > 20)
        await here.cut()
        await reading
        assert [token for event in events for token in event.token_ids] == tokens_of(9, LONG)
        logged = [unpack_ids(entry.ids)[0] for event in events for entry in event.logprobs or []]
        assert logged == tokens_of(9, LONG)
        assert here.got(Resume) == []
        assert router.core.stats.moves[MoveCause.RELINK] == 1


async def test_an_engine_that_forgot_the_request_after_a_reconnect_loses_it_to_another() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, _ = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 20)
        here.script.forget = True
        await here.cut()
        assert await reading == {0: tokens_of(9, LONG)}
        assert router.core.stats.moves[MoveCause.FORGOTTEN] == 1


async def test_a_restart_with_a_new_boot_is_a_death() -> None:
    async with running(FakeEngine("a")) as router:
        generation, here, _ = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 20)
        first_boot = here.boot
        await here.restart()
        assert await reading == {0: tokens_of(9, LONG)}
        assert [submit.attempt for submit in here.got(Submit)] == [1, 2]
        assert here.got(Submit)[1].engine_boot != first_boot


async def test_a_frozen_engine_is_suspect_then_dead_and_its_requests_move() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 5)
        here.freeze()
        client = router.client(here)
        await until(lambda: client.state is EngineState.SUSPECT)
        assert client not in router.core.registry.usable()
        fresh = await router.core.dispatcher.submit(router.request())
        assert fresh.decode_engine == other.name
        await fresh.aclose()
        assert await reading == {0: tokens_of(9, LONG)}
        assert generation.decode_engine == other.name
        here.thaw()
        await until(lambda: client in router.core.registry.usable())
        await until(lambda: here.got(Abort))
        assert here.open_sequences == []


async def test_two_deaths_without_a_token_end_the_request_not_the_fleet() -> None:
    async with running(FakeEngine("a"), FakeEngine("b"), FakeEngine("c")) as router:
        for engine in router.engines:
            engine.script.crash_on_submit = True
        with pytest.raises(EngineFailedError):
            await router.core.dispatcher.submit(router.request())
        assert sum(len(engine.got(Submit)) for engine in router.engines) == 2


async def test_two_deaths_after_acceptance_without_a_token_end_the_request() -> None:
    async with running(FakeEngine("a"), FakeEngine("b"), FakeEngine("c")) as router:
        for engine in router.engines:
            engine.script.hold = True
        generation, here, _ = await begin(router)
        await here.crash()
        await until(lambda: generation.decode_engine != here.name)
        second = next(engine for engine in router.engines if engine.name == generation.decode_engine)
        await second.crash()
        with pytest.raises(EngineFailedError):
            await collect(generation)
        assert router.core.dispatcher.num_in_flight == 0


async def test_deaths_after_tokens_do_not_count() -> None:
    async with running(FakeEngine("a"), FakeEngine("b"), FakeEngine("c"), FakeEngine("d")) as router:
        generation, here, _ = await begin(router)
        reading = in_background(collect(generation))
        for _ in range(3):
            await until(lambda here=here: num_emitted(here) > 10)
            known = num_emitted(here)
            await here.crash()
            await until(lambda gone=here: generation.decode_engine != gone.name)
            here = next(engine for engine in router.engines if engine.name == generation.decode_engine)
            await until(lambda here=here, known=known: num_emitted(here) > known + 5)
        assert await reading == {0: tokens_of(9, LONG)}


async def test_a_request_waits_for_an_engine_to_come_back() -> None:
    async with running(FakeEngine("a")) as router:
        generation, here, _ = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 10)
        await here.crash()
        await until(lambda: not router.core.registry.usable())
        await asyncio.sleep(0.1)
        await here.start()
        assert await reading == {0: tokens_of(9, LONG)}


async def test_the_wait_for_another_engine_ends() -> None:
    async with running(FakeEngine("a"), resume_wait=0.1) as router:
        generation, here, _ = await begin(router)
        await until(lambda: num_emitted(here) > 10)
        await here.crash()
        with pytest.raises(EngineFailedError):
            await collect(generation)


async def test_a_stream_never_continues_on_an_engine_with_other_output() -> None:
    async with running(FakeEngine("a"), FakeEngine("b", info=model_info(output_hash="new")), resume_wait=0.2) as router:
        seen: dict[str, Generation] = {}
        while "a" not in seen:
            generation = await router.core.dispatcher.submit(router.request(seeds=[9], max_tokens=LONG))
            seen[generation.decode_engine] = generation
        await until(lambda: num_emitted(router.engines[0]) > 10)
        await router.engines[0].crash()
        with pytest.raises(EngineFailedError):
            await collect(seen["a"])
        for generation in seen.values():
            await generation.aclose()


async def test_a_draining_engine_hands_its_requests_over_without_a_repeated_token() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        prompt = list(range(64))
        request = router.request(seeds=[9], max_tokens=LONG, prompt_ids=prompt)
        generation = await router.core.dispatcher.submit(request)
        here = next(engine for engine in router.engines if engine.name == generation.decode_engine)
        other = next(engine for engine in router.engines if engine is not here)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 20)
        here.drain()
        assert await reading == {0: tokens_of(9, LONG)}
        assert generation.decode_engine == other.name
        assert here.got(Abort)
        submit = other.got(Submit)[0]
        assert [hint.boot for hint in submit.prefill_hints] == [here.boot]
        assert router.core.stats.moves[MoveCause.HANDOFF] == 1


async def test_a_draining_engine_without_a_successor_goes_on() -> None:
    async with running(FakeEngine("a")) as router:
        generation, here, _ = await begin(router, max_tokens=100)
        reading = in_background(collect(generation))
        here.drain()
        assert await reading == {0: tokens_of(9, 100)}
        assert here.got(Abort) == []


async def test_a_draining_engine_that_leaves_before_a_successor_came_is_not_held_against_the_request() -> None:
    async with running(FakeEngine("a")) as router:
        here = router.engines[0]
        here.script.hold = True
        generation, _, _ = await begin(router, max_tokens=100)
        here.drain()
        await here.leave()
        here.draining = False
        here.script.hold = False
        await here.start()
        assert await collect(generation) == {0: tokens_of(9, 100)}


async def test_a_handoff_of_an_old_attempt_is_ignored() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router)
        rid = here.got(Submit)[0].rid
        here.broadcast(Handoff(rid=rid, attempt=7))
        await asyncio.sleep(0.03)
        assert other.got(Submit) == []
        await generation.aclose()


async def test_busy_successors_are_tried_again() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router)
        reading = in_background(collect(generation))
        other.script.reject = Rejected(rid="", attempt=0, code=RejectCode.BUSY, message="full")
        await until(lambda: num_emitted(here) > 10)
        await here.crash()
        await until(lambda: len(other.got(Submit)) >= 2)
        other.script.reject = None
        assert await reading == {0: tokens_of(9, LONG)}


async def test_repeated_steps_are_delivered_once() -> None:
    async with running(FakeEngine("a")) as router:
        router.engines[0].script.duplicate_steps = True
        generation, _, _ = await begin(router, max_tokens=50)
        assert await collect(generation) == {0: tokens_of(9, 50)}
        assert router.core.stats.num_duplicate_tokens >= 49


async def test_missing_steps_are_asked_for_again() -> None:
    async with running(FakeEngine("a")) as router:
        generation, here, _ = await begin(router)
        reading = in_background(collect(generation))
        await until(lambda: num_emitted(here) > 10)
        here.script.drop_steps = 3
        assert await reading == {0: tokens_of(9, LONG)}
        assert router.core.stats.num_gaps == 1
        assert len(here.got(Resume)) == 1


async def test_steps_for_others_change_nothing() -> None:
    async with running(FakeEngine("a")) as router:
        router.engines[0].script.stray_steps = True
        generation, here, _ = await begin(router, max_tokens=50)
        assert await collect(generation) == {0: tokens_of(9, 50)}
        assert router.client(here).num_stray > 0
        assert router.core.stats.num_stray_rows > 0


async def test_closing_during_a_move_leaves_nothing_behind() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        generation, here, other = await begin(router)
        other.script.silent = True
        await until(lambda: num_emitted(here) > 5)
        await here.crash()
        await until(lambda: other.got(Submit))
        await generation.aclose()
        await until(lambda: other.got(Abort))
        assert router.core.dispatcher.num_in_flight == 0


async def test_a_hundred_streams_survive_a_crash_and_a_restart() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:

        async def one(seed: int) -> list[int]:
            return (await collect(await router.core.dispatcher.submit(router.request(seeds=[seed], max_tokens=80))))[0]

        reading = asyncio.gather(*(one(seed) for seed in range(100)))
        await until(lambda: num_emitted(router.engines[0]) > 5)
        await router.engines[0].restart()
        await until(lambda: len(router.core.registry.usable()) == 2)
        await router.engines[1].crash()
        assert await reading == [tokens_of(seed, 80) for seed in range(100)]


async def test_several_rows_of_a_sequence_in_one_step_all_count() -> None:
    async with running(FakeEngine("a")) as router:
        here = router.engines[0]
        here.script.hold = True
        generation, _, _ = await begin(router)
        slot = next(iter(here.sequences))
        here.broadcast(
            Step(
                slots=pack_ids([slot, slot]),
                counts=pack_ids([2, 1]),
                offsets=pack_ids([0, 2]),
                token_ids=pack_ids([7, 8, 9]),
                finished={slot: Finish(reason=FinishReason.STOP)},
            )
        )
        assert await collect(generation) == {0: [7, 8, 9]}
