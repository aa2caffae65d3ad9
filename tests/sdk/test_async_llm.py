"""`AsyncLLM` on a tiny checkpoint: streams grow, overlap, and end however their reader or the engine ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.checkpoints import make_checkpoint
from kvferry import AsyncLLM, RequestOutput, SamplingParams
from kvferry_engine.assembly import EngineParts, build_parts
from kvferry_engine.errors import WeightsNotFoundError

NUM_BLOCKS = 32
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "threads": 1,
}
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPT = "The ferry carries keys"

pytestmark = pytest.mark.timeout(120)


class Watched:
    """An `AsyncLLM` and the parts it built, for looking at the engine from outside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built: list[EngineParts] = []

        def keep(*args: Any, **kwargs: Any) -> EngineParts:
            built.append(build_parts(*args, **kwargs))
            return built[-1]

        with monkeypatch.context() as patch:
            patch.setattr("kvferry.async_llm.build_parts", keep)
            self.llm = AsyncLLM(str(make_checkpoint("llama")), **SETTINGS)
        self.core = built[0].core

    @property
    def is_idle(self) -> bool:
        return not self.core.requests() and self.core.is_idle and self.core.scheduler.pool.num_free == NUM_BLOCKS


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Watched(monkeypatch)
    yield made
    made.llm.close()


async def _all(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come true in 20 s"
        await asyncio.sleep(0.01)


# --- streams ------------------------------------------------------------------------------------------------------------


async def test_a_stream_grows_token_by_token_to_a_finished_output(watched: Watched) -> None:
    outputs = await _all(watched.llm.generate(PROMPT, SHORT))

    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8
    assert len(outputs) > 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    last = outputs[-1].outputs[0]
    assert all(last.text.startswith(output.outputs[0].text) for output in outputs)


async def test_an_item_does_not_change_once_it_was_given(watched: Watched) -> None:
    stream = watched.llm.generate(PROMPT, SHORT)
    first = await anext(stream)
    seen = list(first.outputs[0].token_ids)

    await _all(stream)

    assert first.outputs[0].token_ids == seen


async def test_two_streams_run_at_once_and_each_is_as_if_alone(watched: Watched) -> None:
    prompts = ([5, 6, 7], [50, 60, 70])
    alone = [(await _all(watched.llm.generate(prompt, LONG)))[-1].outputs[0].token_ids for prompt in prompts]
    order: list[int] = []

    async def read(number: int) -> list[int]:
        ids: list[int] = []
        async for output in watched.llm.generate(prompts[number], LONG):
            order.append(number)
            ids = output.outputs[0].token_ids
        return ids

    together = await asyncio.gather(read(0), read(1))

    assert list(together) == alone
    assert sum(before != after for before, after in itertools.pairwise(order)) > 10


async def test_chat_is_the_template_and_then_generate(watched: Watched) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    answer = (await _all(watched.llm.chat([{"role": "user", "content": "Hello"}], SHORT)))[-1]

    plain = (await _all(watched.llm.generate(text, SHORT)))[-1]
    assert answer.prompt_token_ids == plain.prompt_token_ids
    assert answer.outputs == plain.outputs


async def test_several_outputs_end_when_the_last_does(watched: Watched) -> None:
    params = SamplingParams(n=2, temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)

    first = (await _all(watched.llm.generate(PROMPT, params)))[-1]
    second = (await _all(watched.llm.generate(PROMPT, params)))[-1]

    assert [one.finish_reason for one in first.outputs] == ["length", "length"]
    assert first.outputs == second.outputs


# --- early ends ---------------------------------------------------------------------------------------------------------


async def test_abort_ends_the_stream_with_what_there_is(watched: Watched) -> None:
    outputs = []
    async for output in watched.llm.generate(PROMPT, LONG, request_id="mine"):
        outputs.append(output)
        if len(outputs) == 3:
            await watched.llm.abort("mine")

    assert outputs[-1].finished
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 3 <= len(outputs[-1].outputs[0].token_ids) < 200
    await _until(lambda: watched.is_idle)


async def test_abort_of_an_unknown_request_is_ignored(watched: Watched) -> None:
    await watched.llm.abort("nobody")

    assert (await _all(watched.llm.generate(PROMPT, SHORT)))[-1].finished


async def test_leaving_the_loop_early_aborts_and_frees_the_blocks(watched: Watched) -> None:
    async for _ in watched.llm.generate(PROMPT, LONG):
        break

    await _until(lambda: watched.is_idle)


async def test_closing_the_stream_aborts_at_once_so_that_its_id_is_free(watched: Watched) -> None:
    stream = watched.llm.generate(PROMPT, LONG, request_id="again")
    await anext(stream)

    await stream.aclose()

    assert (await _all(watched.llm.generate(PROMPT, SHORT, request_id="again")))[-1].outputs[
        0
    ].finish_reason == "length"
    await _until(lambda: watched.is_idle)


async def test_cancelling_the_reader_aborts(watched: Watched) -> None:
    task = asyncio.create_task(_all(watched.llm.generate(PROMPT, LONG)))
    await _until(lambda: bool(watched.core.requests()))

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await _until(lambda: watched.is_idle)


def test_a_reader_whose_event_loop_ended_does_not_stop_the_engine(watched: Watched) -> None:
    async def start() -> None:
        stream = watched.llm.generate(PROMPT, LONG)
        await anext(stream)
        abandoned.append(stream)

    abandoned: list[Any] = []
    asyncio.run(start())

    outputs = asyncio.run(_all(watched.llm.generate(PROMPT, SHORT)))

    assert outputs[-1].finished
    asyncio.run(_until(lambda: watched.is_idle))


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([5] * 300, "300 tokens"), ({"prompt": 5}, "a prompt is"), (5, "a prompt is"), ([], "empty")],
)
async def test_a_prompt_that_cannot_run_raises_from_the_stream(watched: Watched, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await _all(watched.llm.generate(prompt, SHORT))

    assert (await _all(watched.llm.generate(PROMPT, SHORT)))[-1].finished


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(watched: Watched) -> None:
    first = watched.llm.generate(PROMPT, SHORT, request_id="twice")
    await anext(first)

    with pytest.raises(ValueError, match="'twice' is running already"):
        await _all(watched.llm.generate(PROMPT, SHORT, request_id="twice"))

    assert (await _all(first))[-1].outputs[0].finish_reason == "length"


def test_a_model_that_is_not_there_raises_from_the_constructor() -> None:
    with pytest.raises(WeightsNotFoundError):
        AsyncLLM("/nowhere/model")
    with pytest.raises(ValueError, match="dtype is 'x'"):
        AsyncLLM("/nowhere/model", dtype="x")


# --- the end ------------------------------------------------------------------------------------------------------------


async def test_close_ends_streams_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Watched(monkeypatch)
    readers = [asyncio.create_task(_all(own.llm.generate([5 + i, 6, 7], LONG))) for i in range(2)]
    await _until(lambda: len(own.core.requests()) == 2)

    await asyncio.to_thread(own.llm.close)

    for reader in readers:
        with pytest.raises(RuntimeError, match="closed"):
            await reader
    with pytest.raises(RuntimeError, match="closed"):
        await _all(own.llm.generate(PROMPT, SHORT))
    own.llm.close()


async def test_a_failure_of_the_engine_reaches_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Watched(monkeypatch)
    stream = own.llm.generate(PROMPT, LONG)
    await anext(stream)

    def fail() -> bool:
        raise OSError("the device is gone")

    monkeypatch.setattr(own.core, "turn", fail)

    with pytest.raises(OSError, match="the device is gone"):
        await _all(stream)
    with pytest.raises(RuntimeError, match="closed"):
        await _all(own.llm.generate(PROMPT, SHORT))
    own.llm.close()
