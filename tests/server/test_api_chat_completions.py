"""POST /v1/chat/completions: rendering, answers, chunk order of streams."""

from __future__ import annotations

from typing import Any

import pytest

from server.kit_gateway import SCRIPT, FakeGateway, call, chunks_of, ids_of, make_bundle, make_view

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def chat(gateway: FakeGateway | None = None, **body: Any) -> dict[str, Any]:
    response = await call(gateway or FakeGateway(), PATH, {"messages": HI, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(gateway: FakeGateway | None = None, **body: Any) -> list[dict[str, Any]]:
    return chunks_of(await call(gateway or FakeGateway(), PATH, {"messages": HI, "stream": True, **body}))


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_the_answer_has_every_documented_key() -> None:
    answer = await chat()

    assert list(answer) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs",
        "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {
        "role": "assistant", "content": SCRIPT, "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "reasoning": None,
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert answer["usage"]["prompt_tokens"] == len(ids_of(PROMPT))
    assert answer["usage"]["completion_tokens"] == len(ids_of(SCRIPT)) + 1


async def test_the_prompt_is_the_rendered_template() -> None:
    answer = await chat(return_prompt_text=True, return_token_ids=True)

    assert answer["prompt_text"] == PROMPT
    assert answer["prompt_token_ids"] == ids_of(PROMPT)
    assert answer["choices"][0]["token_ids"][:-1] == ids_of(SCRIPT)


async def test_output_may_fill_the_context_unless_limited() -> None:
    gateway = FakeGateway()

    await chat(gateway)
    await chat(gateway, max_tokens=5)
    await chat(gateway, max_tokens=5, max_completion_tokens=6)

    limits = [request.sampling.max_tokens for request in gateway.requests]
    assert limits == [128 - len(ids_of(PROMPT)), 5, 6]


async def test_max_new_tokens_of_the_model_is_the_default() -> None:
    gateway = FakeGateway(view=make_view(bundle=make_bundle(generation_config={"max_new_tokens": 9})))

    await chat(gateway)

    assert gateway.requests[0].sampling.max_tokens == 9


@pytest.mark.parametrize(("top", "listed"), [(0, 0), (2, 2), (None, 0)])
async def test_logprobs_list_the_sampled_token_among_the_top(top: int | None, listed: int) -> None:
    answer = await chat(logprobs=True, top_logprobs=top, max_tokens=1)

    entry = answer["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("The", -0.5, list(b"The"))
    assert len(entry["top_logprobs"]) == listed
    assert all(top["token"] == "The" for top in entry["top_logprobs"][:1])


async def test_bytes_of_half_characters_are_exact() -> None:
    answer = await chat(logprobs=True, max_tokens=100)

    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == SCRIPT


async def test_echo_puts_the_last_message_in_front_when_the_role_is_the_same() -> None:
    started = [*HI, {"role": "assistant", "content": "Well, "}]
    open_end: dict[str, Any] = {"messages": started, "continue_final_message": True, "echo": True}

    gateway = FakeGateway()
    answer = await chat(gateway, **open_end)
    other = await chat(echo=True)
    chunks = await stream(**open_end)

    assert answer["choices"][0]["message"]["content"] == "Well, " + SCRIPT
    assert answer["prompt_logprobs"][0] is None
    assert gateway.requests[0].prompt_ids == ids_of(PROMPT + "Well, ")
    assert other["choices"][0]["message"]["content"] == SCRIPT
    assert chunks[1]["choices"][0]["delta"] == {"content": "Well, "}


async def test_without_a_generation_prompt_the_role_is_the_last_message_s() -> None:
    answer = await chat(add_generation_prompt=False)

    assert answer["choices"][0]["message"]["role"] == "user"


async def test_template_variables_come_from_request_and_server() -> None:
    template = "{{ a }}{{ b }}{{ enable_thinking }}{{ reasoning_effort }}{{ messages | length }}"
    gateway = FakeGateway(view=make_view(bundle=make_bundle(chat_templates={"default": template})))
    body = {
        "messages": HI, "chat_template_kwargs": {"b": 2, "messages": [], "tokenize": True}, "reasoning_effort": "none",
        "return_prompt_text": True,
    }  # fmt: skip

    response = await call(gateway, PATH, body, default_chat_template_kwargs={"a": 1, "b": 1})

    assert response.json()["prompt_text"] == "12Falsenone1"


async def test_a_trusted_request_may_bring_its_template() -> None:
    body = {"messages": HI, "chat_template": "mine", "return_prompt_text": True}

    trusted = await call(FakeGateway(), PATH, body, trust_request_chat_template=True)

    assert trusted.json()["prompt_text"] == "mine"


async def test_a_stream_opens_with_a_role_chunk_per_choice() -> None:
    chunks = await stream(n=2, max_tokens=2)

    roles = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(c["index"], c["delta"], c["finish_reason"]) for c in roles] == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
    ]
    assert {"prompt_token_ids", "prompt_text"} <= set(chunks[0])


async def test_a_stream_adds_up_to_the_answer_and_ends_with_its_reason() -> None:
    chunks = await stream()

    assert content(chunks) == SCRIPT
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", None)
    assert "system_fingerprint" in chunks[-1]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_tokens_without_text_yield_no_chunk_unless_something_else_is_shown() -> None:
    plain = await stream(max_tokens=100)
    with_ids = await stream(max_tokens=100, return_token_ids=True)
    with_logprobs = await stream(max_tokens=100, logprobs=True)

    shown = [c["delta"] for chunk in plain[1:-1] for c in chunk["choices"]]
    assert all(delta["content"] for delta in shown)
    num_tokens = len(ids_of(SCRIPT)) + 1
    assert len(with_ids) == len(with_logprobs) == num_tokens + 1
    assert [c["token_ids"] for chunk in with_ids[1:] for c in chunk["choices"]] == [
        [i] for i in [*ids_of(SCRIPT), with_ids[-1]["choices"][0]["token_ids"][0]]
    ]


@pytest.mark.parametrize("include", [None, False, True])
@pytest.mark.parametrize("continuous", [None, False, True])
@pytest.mark.parametrize("forced", [False, True])
async def test_every_combination_of_usage_options(include: bool | None, continuous: bool | None, forced: bool) -> None:
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    body = {"messages": HI, "stream": True, "max_tokens": 2, "stream_options": options}

    chunks = chunks_of(await call(FakeGateway(), PATH, body, enable_force_include_usage=forced))

    has_last = bool(include) or forced
    has_every = forced or (bool(include) and bool(continuous))
    assert (chunks[-1]["choices"] == []) == has_last
    body_chunks = chunks[:-1] if has_last else chunks
    assert all(("usage" in chunk) == has_every for chunk in body_chunks)
    assert ("system_fingerprint" in body_chunks[-1]) == (not has_last)
    if has_every:
        assert [chunk["usage"]["completion_tokens"] for chunk in body_chunks] == [0, 1, 2]
    if has_last:
        prompt = len(ids_of(PROMPT))
        assert chunks[-1]["usage"] == {"prompt_tokens": prompt, "total_tokens": prompt + 2, "completion_tokens": 2}


async def test_stop_strings_leak_nothing_into_a_stream() -> None:
    chunks = await stream(stop=["🚀"])

    assert content(chunks) == "The ferry carries "
    assert chunks[-1]["choices"][0]["stop_reason"] == "🚀"


async def test_greedy_twice_and_the_same_seed_twice_ask_for_the_same() -> None:
    gateway = FakeGateway()

    for _ in range(2):
        await chat(gateway, temperature=0, seed=3)

    first, second = gateway.requests
    assert (first.prompt_ids, first.sampling, first.seeds) == (second.prompt_ids, second.sampling, second.seeds)


async def test_session_and_priority_come_from_headers_too() -> None:
    gateway = FakeGateway()
    headers = {"x-session-id": "s", "x-vllm-priority": "-3", "traceparent": "00-1-2-01"}

    await call(gateway, PATH, {"messages": HI, "priority": 5}, headers=headers)
    await call(
        gateway, PATH, {"messages": HI, "priority": 5, "session_id": "b"}, headers={**headers, "x-vllm-priority": "x"}
    )
    await call(gateway, PATH, {"messages": HI, "vllm_xargs": {"session_id": "x"}})

    assert [(r.session_id, r.priority) for r in gateway.requests] == [("s", -3), ("b", 5), ("x", 0)]
    assert gateway.requests[0].traceparent == "00-1-2-01"


async def test_ids_come_from_header_then_body_and_engines_never_see_one_twice() -> None:
    gateway = FakeGateway()

    first = await call(gateway, PATH, {"messages": HI, "request_id": "body"}, headers={"x-request-id": "head"})
    second = await call(gateway, PATH, {"messages": HI, "request_id": "body"})
    third = await call(gateway, PATH, {"messages": HI, "request_id": "body"})

    assert (first.json()["id"], first.headers["x-request-id"]) == ("chatcmpl-head", "head")
    assert second.json()["id"] == third.json()["id"] == "chatcmpl-body"
    assert len({request.rid for request in gateway.requests}) == 3


async def test_the_first_served_name_is_reported_whatever_was_asked_for() -> None:
    for model in (None, "", "tiny", "tiny-alias"):
        assert (await chat(model=model))["model"] == "tiny"


@pytest.mark.parametrize(("mode", "expected"), [("hash", "01234567"), ("none", None), ("custom", "mine")])
async def test_the_fingerprint_has_the_configured_form(mode: str, expected: str | None) -> None:
    settings: dict[str, Any] = {"fingerprint_mode": mode, "fingerprint_value": "mine"}

    response = await call(FakeGateway(), PATH, {"messages": HI}, **settings)

    assert response.json()["system_fingerprint"] == expected
