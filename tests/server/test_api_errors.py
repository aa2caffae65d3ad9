"""Every refusal: its status, type, param and place, the same for answers and streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry_server.errors import (
    ApiError,
    BadRequestError,
    EngineFailedError,
    NotImplementedByModelError,
    ServiceUnavailableError,
    TooManyRequestsError,
)
from kvferry_server.middleware.errors import scrub
from server.kit_gateway import FakeGateway, call, client_of, make_app, make_bundle, make_view

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
SALT = "x" * 129

# field changes, type of the error, its param
SHARED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"seed": 2**63}, "Bad Request", "body.seed"),
    ({"temperature": "warm"}, "Bad Request", "body.temperature"),
    ({"stop": 5}, "Bad Request", "body.stop"),
    ({"truncate_prompt_tokens": -2}, "Bad Request", "body.truncate_prompt_tokens"),
    ({"truncation_side": "top"}, "Bad Request", "body.truncation_side"),
    ({"priority": 2**64}, "Bad Request", "body.priority"),
    ({"logit_bias": [1]}, "Bad Request", "body.logit_bias"),
    ({"bad_words": None}, "Bad Request", "body.bad_words"),
    ({"stream_options": 1}, "Bad Request", "body.stream_options"),
    ({"temperature": -0.1}, "BadRequestError", "temperature"),
    ({"temperature": 2.1}, "BadRequestError", "temperature"),
    ({"top_p": 0}, "BadRequestError", "top_p"),
    ({"top_p": 1.1}, "BadRequestError", "top_p"),
    ({"top_k": -2}, "BadRequestError", "top_k"),
    ({"min_p": -0.1}, "BadRequestError", "min_p"),
    ({"min_p": 1.1}, "BadRequestError", "min_p"),
    ({"presence_penalty": 2.1}, "BadRequestError", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "BadRequestError", "frequency_penalty"),
    ({"repetition_penalty": 0}, "BadRequestError", "repetition_penalty"),
    ({"n": 0}, "BadRequestError", "n"),
    ({"n": 16385}, "BadRequestError", "n"),
    ({"n": 2, "temperature": 0}, "BadRequestError", "n"),
    ({"max_tokens": -1}, "BadRequestError", "max_tokens"),
    ({"max_tokens": 129}, "BadRequestError", "max_tokens"),
    ({"min_tokens": -1}, "BadRequestError", "min_tokens"),
    ({"min_tokens": 11, "max_tokens": 10}, "BadRequestError", "min_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "Bad Request", "body.stop"),
    ({"stop": [""]}, "BadRequestError", "stop"),
    ({"stop": ""}, "BadRequestError", "stop"),
    ({"stop_token_ids": [403]}, "BadRequestError", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "BadRequestError", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "BadRequestError", "logit_bias"),
    ({"logit_bias": {"403": 1}}, "BadRequestError", "logit_bias"),
    ({"allowed_token_ids": []}, "BadRequestError", "allowed_token_ids"),
    ({"allowed_token_ids": [403]}, "BadRequestError", "allowed_token_ids"),
    ({"bad_words": [""]}, "BadRequestError", "bad_words"),
    ({"bad_words": ["x"] * 129}, "BadRequestError", "bad_words"),
    ({"bad_words": ["abcdefgh" * 200]}, "BadRequestError", "bad_words"),
    ({"prompt_logprobs": -2}, "BadRequestError", "prompt_logprobs"),
    ({"prompt_logprobs": "1"}, "BadRequestError", "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, "BadRequestError", "logprob_token_ids"),
    ({"logprob_token_ids": list(range(129))}, "BadRequestError", "logprob_token_ids"),
    ({"stream_interval": 0}, "BadRequestError", "stream_interval"),
    ({"cache_salt": ""}, "BadRequestError", "cache_salt"),
    ({"cache_salt": SALT}, "BadRequestError", "cache_salt"),
    ({"cache_salt": "a@b"}, "BadRequestError", "cache_salt"),
    ({"request_id": None}, "BadRequestError", "request_id"),
    ({"request_id": "x" * 257}, "BadRequestError", "request_id"),
    ({"truncate_prompt_tokens": 129}, "BadRequestError", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "BadRequestError", "prompt"),
    ({"repetition_detection": {"max_pattern_size": 1, "min_count": 1}}, "BadRequestError", "repetition_detection"),
    (
        {"repetition_detection": {"min_pattern_size": 3, "max_pattern_size": 2, "min_count": 2}},
        "BadRequestError",
        "repetition_detection",
    ),
    ({"response_format": {"type": "json_schema"}}, "BadRequestError", "response_format"),
    ({"response_format": {"type": "poem"}}, "BadRequestError", "response_format"),
    ({"structured_outputs": "x"}, "BadRequestError", "structured_outputs"),
    ({"mm_processor_kwargs": {"a": 1}}, "BadRequestError", "mm_processor_kwargs"),
    ({"response_format": {"type": "json_object"}}, "NotImplementedError", "response_format"),
    ({"structured_outputs": {"regex": "a"}}, "NotImplementedError", "structured_outputs"),
    ({"use_beam_search": True}, "NotImplementedError", "use_beam_search"),
    ({"thinking_token_budget": 5}, "NotImplementedError", "thinking_token_budget"),
    ({"watermarking": True}, "NotImplementedError", "watermarking"),
    ({"kv_transfer_params": {"x": 1}}, "NotImplementedError", "kv_transfer_params"),
    ({"model": "other"}, "NotFoundError", "model"),
]
OF_TEXT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "BadRequestError", "prompt"),
    ({"prompt": ""}, "BadRequestError", "prompt"),
    ({"prompt": []}, "BadRequestError", "prompt"),
    ({"prompt": [[]]}, "BadRequestError", "prompt"),
    ({"prompt": [403]}, "BadRequestError", "prompt"),
    ({"prompt": [-1]}, "Bad Request", "body.prompt"),
    ({"prompt": {"a": 1}}, "Bad Request", "body.prompt"),
    ({"prompt": ["x"] * 1025}, "BadRequestError", "prompt"),
    ({"prompt": [5] * 129}, "BadRequestError", "input_tokens"),
    ({"prompt": "xyz " * 100}, "BadRequestError", "input_tokens"),
    ({"prompt": "x" * 100_000}, "BadRequestError", "input_text"),
    ({"prompt": [5] * 128}, "BadRequestError", "max_tokens"),
    ({"n": None}, "Bad Request", "body.n"),
    ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ({"logprobs": "1"}, "BadRequestError", "logprobs"),
    ({"logprobs": -2}, "BadRequestError", "logprobs"),
    ({"logprobs": 21}, "BadRequestError", "logprobs"),
    ({"logprobs": -1}, "BadRequestError", "logprobs"),
    ({"logprobs": 1, "logprob_token_ids": [403]}, "BadRequestError", "logprob_token_ids"),
    ({"suffix": "x"}, "BadRequestError", "suffix"),
    ({"prompt_embeds": "x"}, "NotImplementedError", "prompt_embeds"),
    ({"echo": True, "max_tokens": 0, "logprobs": 1, "logprob_token_ids": [1]}, "BadRequestError", "logprob_token_ids"),
]
OF_CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "BadRequestError", "messages"),
    ({"messages": None}, "Bad Request", "body.messages"),
    ({"messages": [{"content": "x"}]}, "Bad Request", "body.messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "Bad Request", "body.messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "BadRequestError",
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "x " * 150}]}, "BadRequestError", "input_tokens"),
    ({"tools": []}, "BadRequestError", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "BadRequestError", "tools"),
    ({"tool_choice": "auto"}, "BadRequestError", "tool_choice"),
    ({"top_logprobs": 2}, "BadRequestError", "top_logprobs"),
    ({"top_logprobs": "2", "logprobs": True}, "BadRequestError", "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "BadRequestError", "top_logprobs"),
    ({"top_logprobs": -2, "logprobs": True}, "BadRequestError", "top_logprobs"),
    ({"max_completion_tokens": 129}, "BadRequestError", "max_completion_tokens"),
    ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "BadRequestError", "continue_final_message"),
    ({"chat_template": "x"}, "BadRequestError", "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "BadRequestError", "chat_template"),
    ({"reasoning_effort": "extreme"}, "Bad Request", "body.reasoning_effort"),
]
STATUS = {"Bad Request": 400, "BadRequestError": 400, "NotFoundError": 404, "NotImplementedError": 501}
ROWS = [
    *((TEXT, *row) for row in (*SHARED, *OF_TEXT)),
    *((CHAT, *row) for row in (*SHARED, *OF_CHAT)),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "changes", "kind", "param"), ROWS, ids=lambda value: str(value)[:40])
async def test_wrong_fields_are_refused_with_a_status_before_any_stream(
    served: tuple[FakeGateway, Any], path: str, changes: dict[str, Any], kind: str, param: str | None, streamed: bool
) -> None:
    gateway, app = served
    body = {**(HI if path == CHAT else {"prompt": "hi"}), "stream": streamed, **changes}

    async with client_of(app) as client:
        response = await client.post(path, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (STATUS[kind], kind, param), error
    assert error["code"] == response.status_code
    assert error["message"]
    assert gateway.requests == []


@pytest.fixture(scope="module")
def served() -> tuple[FakeGateway, Any]:
    gateway = FakeGateway()
    return gateway, make_app(gateway)


async def test_stream_options_without_stream_are_refused() -> None:
    response = await call(FakeGateway(), CHAT, {**HI, "stream_options": {"include_usage": True}})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_prompt_logprobs_in_streams_must_be_zero() -> None:
    refused = await call(FakeGateway(), TEXT, {"prompt": "hi", "stream": True, "prompt_logprobs": 1})
    accepted = await call(FakeGateway(), TEXT, {"prompt": "hi", "stream": True, "prompt_logprobs": 0})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert accepted.status_code == 200


async def test_messages_end_with_parameter_and_value() -> None:
    response = await call(FakeGateway(), TEXT, {"prompt": "hi", "temperature": 3})

    assert response.json()["error"]["message"].endswith("(parameter=temperature, value=3.0)")


async def test_the_context_length_is_named() -> None:
    response = await call(FakeGateway(), TEXT, {"prompt": [5] * 129})

    assert "maximum context length is 128 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
async def test_numbers_that_are_none_are_refused(number: str, field: str) -> None:
    async with client_of(make_app(FakeGateway())) as client:
        response = await client.post(
            TEXT, content=f'{{"prompt": "hi", "{field}": {number}}}', headers={"content-type": "application/json"}
        )

    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "hi",}', "body.16"),
        (b"{", "body.1"),
        (b"", "body"),
        (b"  ", "body"),
        (b"[1]", "body"),
        (b'"text"', "body"),
        (b"null", "body"),
        (b'{"prompt": "\\ud800"}', "body.0"),
        (b'{"prompt": "\xff"}', "body.0"),
        (b'{"n": ' + b"9" * 5000 + b"}", "body.0"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b'{"x":' * 100_000, "body"),
    ],
    ids=lambda value: str(value[:20]),
)
async def test_bodies_that_are_no_json_object_are_refused(body: bytes, param: str) -> None:
    async with client_of(make_app(FakeGateway())) as client:
        response = await client.post(TEXT, content=body, headers=JSON)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "Bad Request", param)
    assert error["message"].startswith("1 validation error:\n  ")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_only_json_is_accepted(content_type: str | None) -> None:
    async with client_of(make_app(FakeGateway())) as client:
        response = await client.post(TEXT, content=b'{"prompt":"hi"}', headers={"content-type": content_type or ""})

    assert (response.status_code, response.json()["error"]["type"]) == (400, "Bad Request")
    assert "only application/json is allowed" in response.json()["error"]["message"]


async def test_a_charset_is_fine() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        response = await client.post(
            TEXT, content=b'{"prompt":"hi"}', headers={"content-type": "application/JSON; charset=utf-8"}
        )

    assert response.status_code == 200


async def test_many_errors_are_counted_and_cut() -> None:
    response = await call(FakeGateway(), CHAT, {"messages": [{"content": "x" * 500}] * 30})

    message = response.json()["error"]["message"]
    assert message.startswith("30 validation errors:")
    assert message.endswith("... and 20 more")
    assert len(message) < 12_000


async def test_unknown_paths_and_methods_have_the_bare_shape() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        missing = await client.get("/v1/nothing")
        method = await client.get(TEXT)

    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (method.status_code, method.json()) == (405, {"detail": "Method Not Allowed"})
    assert method.headers["allow"] == "POST"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequestError("no", param="prompt"), 400, "BadRequestError"),
        (NotImplementedByModelError("no"), 501, "NotImplementedError"),
        (TooManyRequestsError("full", retry_after_s=2.4), 429, "Too Many Requests"),
        (ServiceUnavailableError("none", retry_after_s=0.2), 503, "Service Unavailable"),
    ],
)
async def test_refusals_of_engines_are_statuses_of_streams_too(
    error: ApiError, status: int, kind: str, streamed: bool
) -> None:
    response = await call(FakeGateway(refusal=error), CHAT, {**HI, "stream": streamed})

    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    if error.retry_after_s is not None:
        assert response.headers["retry-after"] == str(max(1, round(error.retry_after_s)))


async def test_one_refused_prompt_lets_go_of_the_others() -> None:
    class Picky(FakeGateway):
        async def submit(self, request: Any) -> Any:
            if request.prompt_ids == [9]:
                raise ServiceUnavailableError("full")
            return await super().submit(request)

    gateway = Picky()
    response = await call(gateway, TEXT, {"prompt": [[5], [9], [6]]})

    assert response.status_code == 503
    assert gateway.num_open == 0


async def test_no_engine_is_a_503_that_says_when_to_come_back() -> None:
    response = await call(FakeGateway(view=None), CHAT, HI)

    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_model_without_generation_is_a_501() -> None:
    response = await call(FakeGateway(view=make_view(tasks=["embed"])), CHAT, HI)

    assert response.status_code == 501


async def test_a_model_without_template_is_a_400() -> None:
    response = await call(FakeGateway(view=make_view(bundle=make_bundle(chat_templates={}))), CHAT, HI)

    assert response.status_code == 400
    assert "default chat template is no longer allowed" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_failure_before_the_first_token_is_a_status_of_the_stream(path: str) -> None:
    gateway = FakeGateway(fail_after=0)

    response = await call(gateway, path, {**HI, "prompt": "hi", "stream": True})

    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalServerError")
    assert gateway.num_open == 0


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "gateway",
    [FakeGateway(fail_after=2), FakeGateway(raise_after=EngineFailedError("gone at 0x7f00 in /srv/app/x.py"))],
    ids=["finish", "raise"],
)
async def test_a_failure_in_the_middle_is_an_error_frame_and_done(path: str, gateway: FakeGateway) -> None:
    response = await call(gateway, path, {**HI, "prompt": "hi", "stream": True})

    frames = response.text.split("\n\n")
    assert response.status_code == 200
    assert frames[-2:] == ["data: [DONE]", ""]
    error = json.loads(frames[-3].removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["param"]) == ("InternalServerError", 500, None)
    assert "0x7f00" not in error["message"]
    assert "/srv" not in error["message"]
    assert gateway.num_open == 0


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_failure_of_an_answer_is_a_500(path: str) -> None:
    gateway = FakeGateway(fail_after=2)

    response = await call(gateway, path, {**HI, "prompt": "hi"})

    assert response.status_code == 500
    assert gateway.num_open == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_unforeseen_errors_tell_clients_nothing(streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeGateway):
        async def submit(self, request: Any) -> Any:
            raise RuntimeError("secret detail")

    response = await call(Broken(), CHAT, {**HI, "stream": streamed})

    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalServerError")
    assert "secret" not in response.text
    assert "request failed unexpectedly" in caplog.text


def test_messages_are_scrubbed() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\nbad <X object at 0x7f12> in /srv/models/x.json'

    assert scrub(text).strip() == "bad <X object> in <path>"
