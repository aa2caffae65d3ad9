"""Models, tokenizer and small endpoints, keys, CORS, access lines, settings, metrics."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry_engine.wire.messages import Counters, Load
from kvferry_server.app import create_app
from kvferry_server.metrics import EngineReport, RouterMetrics
from kvferry_server.middleware.auth import KeyStore
from kvferry_server.settings import RouterSettings, SettingsError, from_environment
from server.kit_gateway import CHATML, FakeGateway, call, client_of, ids_of, make_app, make_bundle, make_view

HI = [{"role": "user", "content": "hi"}]


async def test_models_have_a_card_per_served_name() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        cards = (await client.get("/v1/models")).json()
        one = await client.get("/v1/models/tiny-alias")
        missing = await client.get("/v1/models/org/other")

    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "tiny-alias"]
    card = cards["data"][0]
    assert (card["object"], card["root"], card["parent"], card["max_model_len"]) == ("model", "/models/tiny", None, 128)
    permission = card["permission"][0]
    assert (permission["allow_sampling"], permission["allow_fine_tuning"], permission["organization"]) == (
        True,
        False,
        "*",
    )
    assert one.json()["id"] == "tiny-alias"
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")


async def test_names_with_slashes_have_cards_too() -> None:
    async with client_of(make_app(FakeGateway(view=make_view(names=["org/name"])))) as client:
        assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"


async def test_tokenize_of_a_prompt() -> None:
    answer = (await call(FakeGateway(), "/tokenize", {"prompt": "hi there", "return_token_strs": True})).json()

    ids = ids_of("hi there")
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 128)
    assert len(answer["token_strs"]) == len(ids)


async def test_tokenize_adds_special_tokens_to_prompts_but_not_to_chats() -> None:
    gateway = FakeGateway(view=make_view(bundle=make_bundle(add_bos_token=True)))

    prompt = (await call(gateway, "/tokenize", {"prompt": "hi"})).json()["tokens"]
    bare = (await call(gateway, "/tokenize", {"prompt": "hi", "add_special_tokens": False})).json()["tokens"]
    chat = (await call(gateway, "/tokenize", {"messages": HI})).json()["tokens"]

    assert prompt[1:] == bare == ids_of("hi")
    assert chat == ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_tokenize_has_no_length_limit() -> None:
    answer = await call(FakeGateway(), "/tokenize", {"prompt": "x " * 500})

    assert answer.json()["count"] > 128


async def test_tokenize_needs_a_prompt_or_messages_and_trusts_no_template() -> None:
    neither = await call(FakeGateway(), "/tokenize", {})
    template = await call(FakeGateway(), "/tokenize", {"messages": HI, "chat_template": "x"})

    assert (neither.status_code, neither.json()["error"]["param"]) == (400, "body.prompt")
    assert (template.status_code, template.json()["error"]["param"]) == (400, "chat_template")


async def test_detokenize_skips_unknown_ids_and_refuses_negative_ones() -> None:
    known = await call(FakeGateway(), "/detokenize", {"tokens": [*ids_of("hi 🚀"), 2**62, 5000]})
    negative = await call(FakeGateway(), "/detokenize", {"tokens": [-1]})

    assert known.json() == {"prompt": "hi 🚀"}
    assert (negative.status_code, negative.json()["error"]["param"]) == (400, "body.tokens.0")


async def test_small_endpoints() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        answers = [await client.get(path) for path in ("/health", "/ping", "/version", "/load")]
        posted = await client.post("/ping")

    assert [answer.status_code for answer in (*answers, posted)] == [200] * 5
    assert answers[0].content == b""
    assert set(answers[2].json()) == {"version"}
    assert answers[3].json() == {"server_load": 0}


async def test_health_is_503_without_engines() -> None:
    async with client_of(make_app(FakeGateway(view=None))) as client:
        codes = [(await client.get(path)).status_code for path in ("/health", "/ping", "/v1/models", "/version")]

    assert codes == [503, 503, 503, 200]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1zzz", "/tokenize", "/detokenize", "/nothing"])
async def test_keys_guard_everything_but_what_says_nothing_about_users(path: str) -> None:
    async with client_of(make_app(FakeGateway(), api_key=("one", "two"))) as client:
        for header in (
            {},
            {"authorization": "Bearer "},
            {"authorization": "Bearer on"},
            {"authorization": "Basic one"},
        ):
            refused = await client.post(path, json={}, headers=header)
            assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        for key in ("one", "two"):
            accepted = await client.post(path, json={}, headers={"authorization": f"bearer {key}"})
            assert accepted.status_code != 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/metrics"])
async def test_probes_and_metrics_need_no_key(path: str) -> None:
    async with client_of(make_app(FakeGateway(), api_key=("one",))) as client:
        assert (await client.get(path)).status_code == 200
        assert (await client.options("/v1/models")).status_code != 401


def test_the_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "keys"
    file.write_text("old\n\n")
    keys = KeyStore((), str(file), clock=lambda: now)
    assert keys.accepts("old")

    file.write_text("new\nother\n")
    os.utime(file, ns=(1, 1))
    assert keys.accepts("old")
    now = 2.0

    assert keys.accepts("new")
    assert keys.accepts("other")
    assert not keys.accepts("old")
    assert not keys.accepts("")


def test_an_emptied_key_file_locks_the_door_and_a_missing_one_keeps_it(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "keys"
    file.write_text("old")
    keys = KeyStore((), str(file), clock=lambda: now)

    file.unlink()
    now = 2.0
    assert keys.accepts("old")
    file.write_text("")
    now = 4.0

    assert not keys.accepts("old")
    assert not keys.accepts("")
    assert not keys.is_open


def test_a_key_file_without_keys_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(SettingsError, match="cannot be read"):
        make_app(FakeGateway(), api_key_file=str(file))
    file.write_text("\n")
    with pytest.raises(SettingsError, match="holds no key"):
        make_app(FakeGateway(), api_key_file=str(file))


async def test_allowed_origins_may_read_answers_and_refusals() -> None:
    settings: dict[str, Any] = {"allowed_origins": ("https://a.example",), "api_key": ("k",)}
    async with client_of(make_app(FakeGateway(), **settings)) as client:
        refused = await client.get("/v1/models", headers={"origin": "https://a.example"})
        other = await client.get("/version", headers={"origin": "https://b.example"})

    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers
    assert "origin" in other.headers["vary"].lower()


async def test_access_lines_are_json_without_user_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await call(
            FakeGateway(), "/v1/completions?q=secret", {"prompt": "secret prompt"}, headers={"x-request-id": "r1"}
        )

    lines = [json.loads(record.message) for record in caplog.records if record.name == "kvferry.access"]
    assert [(line["path"], line["status"], line["request_id"]) for line in lines] == [("/v1/completions", 200, "r1")]
    assert (lines[0]["decode"], lines[0]["prefill"]) == ("decode-0", "prefill-0")
    assert not [record for record in caplog.records if record.name.startswith("kvferry") and "secret" in record.message]


async def test_access_lines_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await call(FakeGateway(), "/v1/completions", {"prompt": "a"}, disable_access_log=True)

    assert not [record for record in caplog.records if record.name == "kvferry.access"]


@pytest.mark.parametrize("given", ["", "x" * 300])
async def test_ids_that_are_no_ids_are_replaced(given: str) -> None:
    async with client_of(make_app(FakeGateway())) as client:
        response = await client.get("/version", headers={"x-request-id": given})

    assert len(response.headers["x-request-id"]) == 32


async def test_a_closing_router_asks_clients_to_reconnect() -> None:
    app = create_app(RouterSettings(), FakeGateway(), metrics=RouterMetrics(), is_closing=lambda: True)
    async with client_of(app) as client:
        assert (await client.get("/health")).headers["connection"] == "close"


async def test_documents_can_be_switched_off() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    async with client_of(make_app(FakeGateway(), disable_fastapi_docs=True)) as client:
        assert [(await client.get(path)).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3

    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["properties"]


async def test_new_assets_are_used_from_the_next_request_on() -> None:
    gateway = FakeGateway()
    app = make_app(gateway)
    body = {"messages": HI, "return_prompt_text": True}
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=body)
        gateway.view = make_view(bundle=make_bundle(chat_templates={"default": f"new {CHATML}"}))
        answer = await client.post("/v1/chat/completions", json=body)

    assert answer.json()["prompt_text"].startswith("new <|im_start|>")


@pytest.mark.parametrize(
    "settings", [{"max_n": 0}, {"fingerprint_mode": "custom"}, {"api_key": ("",)}, {"stream_interval": 0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        RouterSettings(**settings)


def test_a_template_file_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="no readable file"):
        make_app(FakeGateway(), chat_template="/nowhere/chat.jinja")


SETTINGS = """
host port uds metrics_port root_path ssl_keyfile ssl_certfile ssl_ca_certs timeout_keep_alive shutdown_timeout
shutdown_delay log_level decode prefill name service wire_secret_file policy disaggregation on_prefill_unavailable
max_queued_requests max_queued_tokens submit_timeout resume_wait request_timeout api_key api_key_file allowed_origins
allowed_methods allowed_headers allow_credentials max_body_bytes max_json_depth max_n max_completion_prompts
max_stop_strings max_bad_words max_bad_words_tokens skip_model_name_validation disable_fastapi_docs response_role
return_tokens_as_token_ids enable_prompt_tokens_details enable_force_include_usage fingerprint_mode fingerprint_value
stream_interval sse_keep_alive_interval disable_access_log disable_access_log_for_endpoints chat_template
chat_template_content_format default_chat_template_kwargs trust_request_chat_template chat_template_render_timeout
tokenizer_threads generation_config override_generation_config
"""


def test_the_list_of_settings_is_frozen_and_every_one_is_explained() -> None:
    fields = RouterSettings.__dataclass_fields__

    assert list(fields) == SETTINGS.split()
    assert all(field.metadata["help"].endswith(".") for field in fields.values())


def test_secrets_come_from_the_environment_and_flags_win() -> None:
    environ = {"VLLM_API_KEY": "a", "KVFERRY_NAME": "r0"}

    assert from_environment(RouterSettings(), environ).api_key == ("a",)
    assert from_environment(RouterSettings(api_key=("b",)), {**environ, "KVFERRY_API_KEY": "c"}).api_key == ("b",)
    assert from_environment(RouterSettings(), {**environ, "KVFERRY_API_KEY": "c"}).api_key == ("c",)
    assert from_environment(RouterSettings(), environ).name == "r0"


METRIC_NAMES = """
http_request_duration_highr_seconds http_request_duration_seconds http_request_size_bytes http_requests
http_response_size_bytes kvferry_client_disconnects kvferry_engine_corrupt_chunks kvferry_engine_leaked_blocks
kvferry_engine_step_age_seconds kvferry_engine_steps kvferry_engine_tombstones kvferry_engine_transfer_bytes_in
kvferry_engine_transfer_bytes_out kvferry_engine_transfer_failures kvferry_engine_transfers_in
kvferry_engine_transfers_out kvferry_engine_up kvferry_errors kvferry_http_requests_in_flight kvferry_prompt_path
kvferry_transfer_exposed_seconds kvferry_transferred_bytes vllm:admission_rejections vllm:cache_config_info
vllm:e2e_request_latency_seconds vllm:external_prefix_cache_hits vllm:external_prefix_cache_queries
vllm:generation_tokens vllm:inter_token_latency_seconds vllm:kv_cache_usage_perc vllm:num_preemptions
vllm:num_requests_running vllm:num_requests_waiting vllm:prefix_cache_hits vllm:prefix_cache_queries
vllm:prompt_tokens vllm:prompt_tokens_by_source vllm:prompt_tokens_cached vllm:request_decode_time_seconds
vllm:request_generation_tokens vllm:request_inference_time_seconds vllm:request_max_num_generation_tokens
vllm:request_params_max_tokens vllm:request_params_n vllm:request_prefill_kv_computed_tokens
vllm:request_prefill_time_seconds vllm:request_prompt_tokens vllm:request_queue_time_seconds vllm:request_success
vllm:request_time_per_output_token_seconds vllm:time_to_first_token_seconds
"""


def test_the_list_of_metrics_is_frozen() -> None:
    families = {family.name for family in RouterMetrics().registry.collect()}

    ours = {name for name in families if not name.startswith(("process_", "python_"))}
    assert sorted(ours) == METRIC_NAMES.split()


async def test_a_request_shows_in_the_metrics() -> None:
    async with client_of(make_app(FakeGateway())) as client:
        await client.post("/v1/completions", json={"prompt": [5] * 40, "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "x", "n": 0})
        text = (await client.get("/metrics")).text

    labels = 'engine="decode-0",model_name="tiny"'
    for line in (
        f"vllm:prompt_tokens_total{{{labels}}} 40.0",
        f"vllm:generation_tokens_total{{{labels}}} 3.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 32.0",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 8.0',
        'vllm:request_success_total{engine="decode-0",finished_reason="length",model_name="tiny"} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 2.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
        'kvferry_errors_total{status="400",type="BadRequestError"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
    ):
        assert line in text, line


def test_engines_are_read_at_scrape_time() -> None:
    metrics = RouterMetrics()
    info = make_view().info
    load = Load(num_running=2, num_waiting=3, free_blocks=48, used_blocks=16)
    metrics.watch_engines(
        lambda: [
            EngineReport(name="d0", role="decode", usable=True, info=info, load=load, counters=Counters(preemptions=4)),
            EngineReport(name="p0", role="prefill", usable=False),
        ]
    )

    value = metrics.registry.get_sample_value
    labels = {"model_name": "tiny", "engine": "d0"}
    assert value("vllm:num_requests_running", labels) == 2
    assert value("vllm:num_requests_waiting", labels) == 3
    assert value("vllm:kv_cache_usage_perc", labels) == 0.25
    assert value("vllm:num_preemptions_total", labels) == 4
    assert value("kvferry_engine_up", {"engine": "p0", "role": "prefill"}) == 0
