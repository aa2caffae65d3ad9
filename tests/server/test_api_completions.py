"""POST /v1/completions: prompt forms, choices, echo, log-probs, stopping, streams."""

from __future__ import annotations

from typing import Any

import pytest

from server.kit_gateway import (
    SCRIPT,
    FakeGateway,
    call,
    chunks_of,
    ids_of,
    make_bundle,
    make_view,
    text_of,
    token_id,
)

PATH = "/v1/completions"


async def complete(gateway: FakeGateway | None = None, **body: Any) -> dict[str, Any]:
    response = await call(gateway or FakeGateway(), PATH, {"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(gateway: FakeGateway | None = None, **body: Any) -> list[dict[str, Any]]:
    return chunks_of(await call(gateway or FakeGateway(), PATH, {"prompt": "hi", "stream": True, **body}))


def texts(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_the_answer_has_every_documented_key() -> None:
    answer = await complete(max_tokens=2)

    assert list(answer) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"].startswith("kvferry-")
    assert answer["system_fingerprint"].endswith("-01234567")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": text_of(ids_of(SCRIPT)[:2]),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(ids_of("hi")),
        "total_tokens": len(ids_of("hi")) + 2,
        "completion_tokens": 2,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", [ids_of("a b")]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], [ids_of("a"), ids_of("b")]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_all_four_prompt_forms_reach_the_engine(prompt: Any, expected: list[list[int]]) -> None:
    gateway = FakeGateway()

    answer = await complete(gateway, prompt=prompt, max_tokens=1)

    assert [request.prompt_ids for request in gateway.requests] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_are_in_prompt_major_order_whoever_finishes_first() -> None:
    def script(request: Any, index: int) -> list[int]:
        return [*request.prompt_ids, 300 + index]

    answer = await complete(
        FakeGateway(script=script),
        prompt=[[5, 6, 7, 8], [9]],
        n=2,
        return_token_ids=True,
        max_tokens=2,
        ignore_eos=True,
    )

    assert [(c["index"], c["token_ids"]) for c in answer["choices"]] == [
        (0, [5, 6]),
        (1, [5, 6]),
        (2, [9, 300]),
        (3, [9, 301]),
    ]
    assert answer["usage"]["completion_tokens"] == 8


async def test_the_default_limit_is_16_also_for_null() -> None:
    gateway = FakeGateway()

    await complete(gateway)
    await complete(gateway, max_tokens=None)

    assert [request.sampling.max_tokens for request in gateway.requests] == [16, 16]


async def test_output_is_limited_to_what_the_context_holds() -> None:
    gateway = FakeGateway()

    await complete(gateway, prompt=[5] * 120, max_tokens=100)

    assert gateway.requests[0].sampling.max_tokens == 8


async def test_logprobs_list_the_sampled_token_first() -> None:
    answer = await complete(logprobs=2, max_tokens=2)

    logprobs = answer["choices"][0]["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert logprobs["tokens"] == ["The", " ferry"]
    assert logprobs["text_offset"] == [0, 3]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert next(iter(logprobs["top_logprobs"][0])) == "The"
    assert 2 <= len(logprobs["top_logprobs"][0]) <= 3


async def test_logprobs_zero_show_only_the_sampled_token() -> None:
    answer = await complete(logprobs=0, max_tokens=1)

    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"The": -0.5}]


async def test_tokens_can_be_printed_as_ids() -> None:
    answer = await complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)

    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ids_of(SCRIPT)[0]}"]


async def test_prompt_logprobs_are_keyed_by_id_with_nothing_for_the_first() -> None:
    answer = await complete(prompt=[5, 6], prompt_logprobs=1, max_tokens=1)

    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": "'"}


async def test_echo_puts_the_prompt_in_front() -> None:
    answer = await complete(echo=True, max_tokens=1)

    assert answer["choices"][0]["text"] == "hiThe"


async def test_echo_with_logprobs_covers_the_prompt() -> None:
    answer = await complete(echo=True, logprobs=2, max_tokens=1)

    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "The"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_echo_without_output_hides_the_one_token_it_costs() -> None:
    answer = await complete(echo=True, logprobs=2, max_tokens=0)

    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 1


async def test_echo_with_token_ids_leaves_the_prompt_text_out() -> None:
    answer = await complete(echo=True, return_token_ids=True, max_tokens=1)

    choice = answer["choices"][0]
    assert choice["text"] == "The"
    assert choice["prompt_token_ids"] == ids_of("hi")
    assert choice["token_ids"] == ids_of(SCRIPT)[:1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("per_event", [1, 3, 50])
async def test_a_stop_string_across_token_borders_ends_the_text_before_it(streamed: bool, per_event: int) -> None:
    gateway = FakeGateway(tokens_per_event=per_event)
    body = {"stop": ["rries 🚀 k"], "max_tokens": 50}

    if streamed:
        chunks = await stream(gateway, **body)
        shown, last = texts(chunks), chunks[-1]["choices"][0]
    else:
        last = (await complete(gateway, **body))["choices"][0]
        shown = last["text"]

    assert shown == "The ferry ca"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "rries 🚀 k")
    assert gateway.generations[0].is_closed


async def test_an_included_stop_string_is_shown() -> None:
    answer = await complete(stop="ferry", include_stop_str_in_output=True, max_tokens=50)

    assert answer["choices"][0]["text"] == "The ferry"


async def test_stop_strings_do_not_count_before_min_tokens() -> None:
    answer = await complete(stop=["ferry"], min_tokens=3, max_tokens=50)

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None


async def test_usage_counts_tokens_up_to_the_stop_string() -> None:
    answer = await complete(FakeGateway(tokens_per_event=50), stop=["ferry"], max_tokens=50, return_token_ids=True)

    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["token_ids"] == ids_of(SCRIPT)[:2]


async def test_a_stop_token_counts_but_is_not_shown() -> None:
    stop_id = ids_of(SCRIPT)[2]

    hidden = await complete(stop_token_ids=[stop_id], max_tokens=50)
    shown = await complete(stop_token_ids=[stop_id], max_tokens=50, include_stop_str_in_output=True)

    choice = hidden["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The ferry", "stop", stop_id)
    assert hidden["usage"]["completion_tokens"] == 3
    assert shown["choices"][0]["text"] == "The ferry carries"


async def test_eos_has_no_stop_reason_and_an_extra_eos_reports_its_id() -> None:
    extra = token_id("<|endoftext|>")
    gateway = FakeGateway()

    plain = await complete(gateway, max_tokens=100)
    other = await complete(FakeGateway(script=lambda request, index: [*ids_of("x"), extra]), max_tokens=100)

    assert gateway.requests[0].sampling.eos_token_ids == [token_id("<|im_end|>")]
    assert (plain["choices"][0]["finish_reason"], plain["choices"][0]["stop_reason"]) == ("stop", None)
    assert plain["choices"][0]["text"] == SCRIPT
    assert other["choices"][0]["stop_reason"] == extra


async def test_ignore_eos_takes_every_eos_away() -> None:
    gateway = FakeGateway()

    await complete(gateway, ignore_eos=True, stop_token_ids=[7, 7], max_tokens=3)

    assert gateway.requests[0].sampling.eos_token_ids == []
    assert gateway.requests[0].sampling.stop_token_ids == [7]


async def test_seeds_are_the_request_s_own_or_drawn() -> None:
    gateway = FakeGateway()

    await complete(gateway, seed=7, n=2, max_tokens=1)
    await complete(gateway, seed=2**63 - 1, n=2, max_tokens=1)
    await complete(gateway, seed=-1, max_tokens=1)
    await complete(gateway, max_tokens=1)

    assert gateway.requests[0].seeds == [7, 8]
    assert gateway.requests[1].seeds == [2**63 - 1, -(2**63)]
    assert gateway.requests[2].seeds != gateway.requests[3].seeds


async def test_truncation_keeps_the_side_that_was_asked_for() -> None:
    gateway = FakeGateway()

    for side in ("left", "right"):
        await complete(gateway, prompt=[5, 6, 7], truncate_prompt_tokens=2, truncation_side=side, max_tokens=1)
    await complete(gateway, prompt=[5] * 500, truncate_prompt_tokens=127, max_tokens=1)

    assert [request.prompt_ids for request in gateway.requests[:2]] == [[6, 7], [5, 6]]
    assert len(gateway.requests[2].prompt_ids) == 127


async def test_sampling_fields_reach_the_engine() -> None:
    gateway = FakeGateway()

    await complete(
        gateway, temperature=0.005, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, min_tokens=1, logit_bias={"5": 1000}, allowed_token_ids=[5], bad_words=["The"],
        logprobs=1, logprob_token_ids=[5], cache_salt="s", priority=3, max_tokens=4,
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
    )  # fmt: skip

    request = gateway.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.01, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.2)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.logit_bias) == (1, 4, {5: 100.0})
    assert (sampling.allowed_token_ids, sampling.logprobs, sampling.logprob_token_ids) == ([5], 1, [5])
    assert sampling.bad_words == [ids_of("The"), ids_of(" The")]
    assert sampling.repetition_detection is not None
    assert sampling.repetition_detection.min_pattern_size == 1
    assert (request.cache_salt, request.priority) == ("s", 3)


async def test_greedy_resets_what_has_no_meaning() -> None:
    gateway = FakeGateway()

    await complete(gateway, temperature=0, top_p=0.5, top_k=4, min_p=0.2, presence_penalty=1)

    sampling = gateway.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)
    assert sampling.presence_penalty == 1


async def test_generation_config_gives_defaults_and_an_override_caps() -> None:
    bundle = make_bundle(generation_config={"temperature": 0.5, "top_k": 7, "max_new_tokens": 5, "eos_token_id": 1})
    gateway = FakeGateway(view=make_view(bundle=bundle))

    await complete(gateway)
    await call(gateway, PATH, {"prompt": "hi", "top_k": 3}, generation_config="vllm")
    await call(gateway, PATH, {"prompt": "hi"}, override_generation_config={"max_new_tokens": 2, "top_k": 9})

    first, second, third = (request.sampling for request in gateway.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (0.5, 7, 16)
    assert (second.temperature, second.top_k) == (1.0, 3)
    assert (third.temperature, third.top_k, third.max_tokens) == (0.5, 9, 2)


async def test_numbers_may_be_strings_and_unknown_and_retired_fields_are_ignored() -> None:
    gateway = FakeGateway()

    await complete(gateway, max_tokens="3", temperature="0.5", best_of=4, guided_json={}, whatever=[1])

    assert (gateway.requests[0].sampling.max_tokens, gateway.requests[0].sampling.temperature) == (3, 0.5)


async def test_logprobs_true_counts_as_one() -> None:
    gateway = FakeGateway()

    await complete(gateway, logprobs=True, max_tokens=1)

    assert gateway.requests[0].sampling.logprobs == 1


async def test_a_stream_adds_up_to_the_answer() -> None:
    chunks = await stream(max_tokens=100)

    assert texts(chunks) == SCRIPT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert set(chunks[0]) == {"id", "object", "created", "model", "choices"}
    assert "system_fingerprint" in chunks[-1]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_usage_comes_in_a_chunk_of_its_own() -> None:
    chunks = await stream(stream_options={"include_usage": True}, max_tokens=2)

    assert "system_fingerprint" not in chunks[-2]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}
    assert "system_fingerprint" in chunks[-1]
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_continuous_usage_counts_up_per_choice() -> None:
    chunks = await stream(stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=3)
    without = await stream(stream_options={"continuous_usage_stats": True}, max_tokens=3)

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert all("usage" not in chunk for chunk in without)


async def test_streamed_echo_and_offsets_go_on_across_chunks() -> None:
    chunks = await stream(echo=True, logprobs=1, max_tokens=2)

    first, second = (chunk["choices"][0] for chunk in chunks)
    assert (first["text"], second["text"]) == ("hiThe", " ferry")
    assert first["prompt_token_ids"] == ids_of("hi")
    assert second["prompt_token_ids"] is None
    assert first["logprobs"]["text_offset"] == [0, 1, 2]
    assert second["logprobs"]["text_offset"] == [5]


async def test_choices_of_several_prompts_and_samples_stream_side_by_side() -> None:
    chunks = await stream(prompt=["a", "b", "c"], n=2, max_tokens=100)

    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == set(range(6))
    assert all(texts(chunks, index) == SCRIPT for index in range(6))


@pytest.mark.parametrize(
    ("server", "client", "expected"), [(1, 4, [1, 5, 9, 11]), (4, None, [1, 5, 9, 11]), (4, 2, [1, 5, 9, 11])]
)
async def test_stream_interval_joins_tokens(server: int, client: int | None, expected: list[int]) -> None:
    body = {
        "prompt": "hi", "stream": True, "max_tokens": 11, "stream_interval": client, "logprobs": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip

    chunks = chunks_of(await call(FakeGateway(), PATH, body, stream_interval=server))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == expected
    assert [len(c["logprobs"]["tokens"]) for chunk in chunks for c in chunk["choices"]] == [1, 4, 4, 2]
    assert texts(chunks) == SCRIPT


async def test_cached_tokens_are_reported_when_switched_on() -> None:
    response = await call(FakeGateway(), PATH, {"prompt": [5] * 40, "max_tokens": 1}, enable_prompt_tokens_details=True)

    assert response.json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 32, "created_cache_tokens": None, "multimodal_tokens": None,
    }  # fmt: skip


async def test_engines_are_named_in_headers_of_answers_and_streams() -> None:
    for streamed in (False, True):
        response = await call(FakeGateway(), PATH, {"prompt": ["a", "b"], "stream": streamed})

        assert response.headers["x-kvferry-decode"] == "decode-0"
        assert response.headers["x-kvferry-prefill"] == "prefill-0"


async def test_echo_waits_for_prompt_logprobs_that_come_with_another_sample() -> None:
    class Late(FakeGateway):
        async def submit(self, request: Any) -> Any:
            generation = await super().submit(request)
            events = generation.events

            async def swapped() -> Any:
                found = [event async for event in events()]
                known, found[0].prompt_logprobs = found[0].prompt_logprobs, None
                for event in found:
                    if event.index == 1:
                        event.prompt_logprobs = known
                        break
                for event in found:
                    yield event

            generation.events = swapped  # type: ignore[method-assign]
            return generation

    chunks = await stream(Late(), echo=True, logprobs=0, n=2, max_tokens=2)

    firsts = [next(c for chunk in chunks for c in chunk["choices"] if c["index"] == index) for index in (0, 1)]
    assert [first["logprobs"]["token_logprobs"] for first in firsts] == [[None, -0.5, -0.5]] * 2
