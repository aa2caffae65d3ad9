"""An LLMService as frozen values, read here by `kvferry up` and the operator, so they cannot disagree about a manifest.

Field names are the manifest's in snake case. Defaults stand in the CRD only; parsing sets them before it builds the
values, and a document from an API server has them already. Nothing here imports kopf or kubernetes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import yaml

from kvferry_operator.errors import Problem, SpecError
from kvferry_operator.rules import LOCAL_SOURCE, check_rules
from kvferry_operator.schema import Schema, check, prune_nulls, service_schema, strict, with_defaults

API_VERSION = "kvferry.dev/v1alpha1"
KIND = "LLMService"


class Place(StrEnum):
    """Where a manifest is going to run."""

    LOCAL = "local"
    CLUSTER = "cluster"


class Task(StrEnum):
    GENERATE = "Generate"
    EMBED = "Embed"
    CLASSIFY = "Classify"
    SCORE = "Score"
    TRANSCRIBE = "Transcribe"


class RoutingPolicy(StrEnum):
    KV_AWARE = "KVAware"
    LEAST_LOAD = "LeastLoad"
    ROUND_ROBIN = "RoundRobin"


class DisaggregationMode(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class OnPrefillUnavailable(StrEnum):
    DECODE_LOCALLY = "DecodeLocally"
    FAIL = "Fail"


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A part of a manifest; camel case outside, snake case inside."""


class SecretKeyRef(_Part, frozen=True, kw_only=True):
    name: str
    key: str


class HubSource(_Part, frozen=True, kw_only=True):
    repo: str
    revision: str | None = None
    token_secret_ref: SecretKeyRef | None = None


class ClaimSource(_Part, frozen=True, kw_only=True):
    claim_name: str
    path: str


class Image(_Part, frozen=True, kw_only=True):
    reference: str
    pull_policy: str | None = None
    pull_secrets: tuple[str, ...] = ()


class Source(_Part, frozen=True, kw_only=True):
    """Where the weights come from; exactly one member is set. `path` exists in local mode only."""

    package: str | None = None
    hf: HubSource | None = None
    pvc: ClaimSource | None = None
    image: Image | None = None
    path: str | None = None


class Model(_Part, frozen=True, kw_only=True):
    name: str
    source: Source
    dtype: str
    load_timeout_seconds: int
    aliases: tuple[str, ...] = ()
    task: Task | None = None
    max_model_len: int | None = None


class Engine(_Part, frozen=True, kw_only=True):
    """Settings shared by both roles; `kv_cache_memory` is a quantity."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_memory: int | str | None = None
    extra_args: tuple[str, ...] = ()


class EnvironmentVariable(_Part, frozen=True, kw_only=True):
    name: str
    value: str | None = None
    value_from: dict[str, Any] | None = None


class PodTemplate(_Part, frozen=True, kw_only=True):
    """What a person adds to the pods of one role; the nested parts are passed on as they are."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    node_selector: dict[str, str] = {}
    affinity: dict[str, Any] | None = None
    tolerations: tuple[dict[str, Any], ...] = ()
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
    image_pull_secrets: tuple[dict[str, Any], ...] = ()
    host_network: bool = False
    security_context: dict[str, Any] | None = None
    env: tuple[EnvironmentVariable, ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()


class Resources(_Part, frozen=True, kw_only=True):
    requests: dict[str, int | str] = {}
    limits: dict[str, int | str] = {}


class EngineGroup(_Part, frozen=True, kw_only=True):
    """The engines of one role."""

    replicas: int
    tensor_parallel: int
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class Router(_Part, frozen=True, kw_only=True):
    """`replicas` None: 2 in a cluster, 1 on one machine."""

    policy: RoutingPolicy
    max_queued_requests: int
    replicas: int | None = None
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class Disaggregation(_Part, frozen=True, kw_only=True):
    mode: DisaggregationMode
    on_prefill_unavailable: OnPrefillUnavailable


class Ingress(_Part, frozen=True, kw_only=True):
    host: str
    class_name: str | None = None
    tls_secret_name: str | None = None
    annotations: dict[str, str] = {}


class HTTPRoute(_Part, frozen=True, kw_only=True):
    parent_refs: tuple[dict[str, Any], ...]
    hostnames: tuple[str, ...] = ()


class Expose(_Part, frozen=True, kw_only=True):
    port: int
    api_key_secret_ref: SecretKeyRef | None = None
    ingress: Ingress | None = None
    http_route: HTTPRoute | None = None


class Rollout(_Part, frozen=True, kw_only=True):
    strategy: str
    min_available_decode: int
    surge_wait_seconds: int
    drain_seconds: int
    progress_deadline_seconds: int
    paused: bool


class Cache(_Part, frozen=True, kw_only=True):
    access_mode: str
    on_delete: str
    claim_name: str | None = None
    storage_class_name: str | None = None
    size: int | str | None = None


class Network(_Part, frozen=True, kw_only=True):
    extra_egress: tuple[dict[str, Any], ...] = ()


class ServiceSpec(_Part, frozen=True, kw_only=True):
    model: Model
    engine: Engine
    router: Router
    decode: EngineGroup
    disaggregation: Disaggregation
    expose: Expose
    rollout: Rollout
    suspend: bool
    prefill: EngineGroup | None = None
    image: Image | None = None
    cache: Cache | None = None
    network: Network = Network()
    wire_key_secret_ref: SecretKeyRef | None = None
    restarted_at: str | None = None


class LLMService(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `uid` is empty outside a cluster."""

    name: str
    namespace: str
    uid: str
    spec: ServiceSpec

    @property
    def identity(self) -> str:
        """namespace/name/uid, which routers and engines tell each other so that services never mix."""
        return f"{self.namespace}/{self.name}/{self.uid}"


def parse_service(document: Any, *, place: Place) -> LLMService:
    """Check a manifest and return its values. Raises SpecError with everything that is wrong."""
    if not isinstance(document, Mapping):
        raise SpecError([Problem(path="", message="a manifest is an object with apiVersion, kind, metadata and spec")])
    _check_kind(document)
    schema = service_schema() if place is Place.CLUSTER else _with_local_source(service_schema())
    pruned = prune_nulls(document)
    pruned.pop("status", None)
    if problems := check(pruned, strict(schema)):
        raise SpecError(problems)
    complete = with_defaults(pruned, schema)
    if problems := check_rules(complete):
        raise SpecError(_with_sources(problems, schema))
    metadata = complete["metadata"]
    return LLMService(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        uid=metadata.get("uid", ""),
        spec=msgspec.convert(complete["spec"], ServiceSpec),
    )


def load_documents(text: str) -> list[Any]:
    """Return the YAML documents of a file as an API server would see them. Raises SpecError for what is not YAML."""
    try:
        return [document for document in yaml.load_all(text, Loader=_ManifestLoader) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError([Problem(path="", message=f"not readable as YAML: {_one_line(error)}")]) from error


def _check_kind(document: Mapping[str, Any]) -> None:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        given = document.get(field)
        if given != wanted:
            message = f"{given} given, {wanted} is required" if given else f"missing, {wanted} is required"
            raise SpecError([Problem(path=field, message=message)])


def _with_local_source(schema: Schema) -> Schema:
    local = copy.deepcopy(schema)
    source = local["properties"]["spec"]["properties"]["model"]["properties"]["source"]
    source["properties"][LOCAL_SOURCE] = {
        "description": "A folder or a .gguf file on this machine, relative to the manifest.",
        "type": "string",
        "minLength": 1,
        "maxLength": 4096,
    }
    return local


def _with_sources(problems: list[Problem], schema: Schema) -> list[Problem]:
    """Add the members to choose from to the rule about sources; CEL messages are static and cannot."""
    members = schema["properties"]["spec"]["properties"]["model"]["properties"]["source"]["properties"]
    return [
        Problem(path=problem.path, message=f"{problem.message}: {' | '.join(members)}")
        if problem.path == "spec.model.source"
        else problem
        for problem in problems
    ]


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


class _ManifestLoader(yaml.SafeLoader):
    """YAML as kubectl reads it: timestamps stay texts, a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is not a text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
