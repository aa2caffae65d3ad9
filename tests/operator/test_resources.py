"""One table of manifests, accepted or rejected, judged by `kvferry up`'s own code and by the CRD's schema and CEL rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cel
import pytest
import yaml

from kvferry_operator.errors import SpecError
from kvferry_operator.resources import Place, load_documents, parse_service
from kvferry_operator.rules import RULES
from kvferry_operator.schema import Schema, check, prune_nulls, service_schema, strict, with_defaults

_MINIMAL = "model: {name: m, source: {package: p}}"


def _document(spec: str, *, name: str = "smollm2") -> dict[str, Any]:
    return {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": yaml.safe_load("{" + spec + "}"),
    }


ACCEPTED = {
    "the smallest": _document(_MINIMAL),
    "the longest name": _document(_MINIMAL, name="a" * 40),
    "a hub source": _document("model: {name: a/b, source: {hf: {repo: org/model, revision: main}}}"),
    "a claim source": _document("model: {name: m, source: {pvc: {claimName: c, path: x/y.gguf}}}"),
    "an image source": _document("model: {name: m, source: {image: {reference: 'r/m@sha256:0'}}}"),
    "aliases": _document("model: {name: m, aliases: [n, o], source: {package: p}}"),
    "both roles": _document(_MINIMAL + ", prefill: {replicas: 2, tensorParallel: 2}, decode: {replicas: 3}"),
    "prefill scaled to nothing": _document(_MINIMAL + ", prefill: {replicas: 0}"),
    "always with prefill": _document(_MINIMAL + ", prefill: {}, disaggregation: {mode: Always}"),
    "suspended without decode": _document(_MINIMAL + ", decode: {replicas: 0}, suspend: true"),
    "memory as a number": _document(_MINIMAL + ", engine: {kvCacheMemory: 1073741824}"),
    "memory as a quantity": _document(_MINIMAL + ", engine: {kvCacheMemory: 1Gi, extraArgs: [--threads, '2']}"),
    "nulls where nothing is meant": _document(_MINIMAL + ", expose: {apiKeySecretRef: null, ingress: null}"),
    "a secret for keys": _document(_MINIMAL + ", expose: {apiKeySecretRef: {name: s, key: k}}"),
    "devices": _document(_MINIMAL + ", decode: {resources: {limits: {nvidia.com/gpu: 1, memory: 1.5Gi, cpu: 500m}}}"),
    "free parts of a pod": _document(
        _MINIMAL + ", decode: {podTemplate: {affinity: {nodeAffinity: {x: 1}}, tolerations: [{key: gpu}]}}"
    ),
    "environment": _document(_MINIMAL + ", decode: {podTemplate: {env: [{name: A, value: b}]}}"),
}

REJECTED = {
    "no model": (_document(""), "spec.model: required, but missing"),
    "no source": (_document("model: {name: m, source: {}}"), "spec.model.source: exactly one source is required"),
    "two sources": (
        _document("model: {name: m, source: {package: p, hf: {repo: r}}}"),
        "spec.model.source: exactly one source is required",
    ),
    "a name like a child's": (_document(_MINIMAL, name="a-decode"), "metadata.name must not end in -prefill"),
    "a name in capitals": (_document(_MINIMAL, name="Smol"), 'metadata.name: "Smol" given, it must match'),
    "a name that is too long": (_document(_MINIMAL, name="a" * 41), "metadata.name: too long, at most 40"),
    "a repeated alias": (
        _document("model: {name: m, aliases: [m], source: {package: p}}"),
        "spec.model: aliases must not repeat name",
    ),
    "equal aliases": (
        _document("model: {name: m, aliases: [n, n], source: {package: p}}"),
        "spec.model.aliases: items must differ",
    ),
    "an odd block size": (_document(_MINIMAL + ", engine: {blockSize: 33}"), "33 given, allowed: 16, 32, 64, 128"),
    "a text for a number": (
        _document(_MINIMAL + ", engine: {maxNumSeqs: many}"),
        'spec.engine.maxNumSeqs: "many" given, a whole number is required',
    ),
    "memory with a blank": (_document(_MINIMAL + ", engine: {kvCacheMemory: 4 Gi}"), "spec.engine.kvCacheMemory: "),
    "negative memory": (_document(_MINIMAL + ", engine: {kvCacheMemory: '-1Gi'}"), "spec.engine.kvCacheMemory: "),
    "a fraction of memory": (_document(_MINIMAL + ", engine: {kvCacheMemory: 1.5}"), "spec.engine.kvCacheMemory: "),
    "no decode": (_document(_MINIMAL + ", decode: {replicas: 0}"), "decode.replicas must be at least 1"),
    "negative replicas": (_document(_MINIMAL + ", prefill: {replicas: -1}"), "-1 given, at least 0 is required"),
    "too many ranks": (_document(_MINIMAL + ", decode: {tensorParallel: 65}"), "65 given, at most 64 is allowed"),
    "always without prefill": (
        _document(_MINIMAL + ", disaggregation: {mode: Always}"),
        "spec: disaggregation.mode Always needs a prefill section",
    ),
    "an unknown mode": (_document(_MINIMAL + ", disaggregation: {mode: auto}"), "allowed: Auto, Always, Never"),
    "a mistyped field": (
        _document(_MINIMAL + ", engine: {blocksize: 16}"),
        "spec.engine.blocksize: unknown field; did you mean blockSize?",
    ),
    "a port out of range": (_document(_MINIMAL + ", expose: {port: 70000}"), "70000 given, at most 65535"),
    "half a secret": (
        _document(_MINIMAL + ", expose: {apiKeySecretRef: {name: s}}"),
        "spec.expose.apiKeySecretRef.key: required, but missing",
    ),
    "a flag as a package": (_document("model: {name: m, source: {package: --help}}"), "spec.model.source.package: "),
    "a path out of the volume": (
        _document("model: {name: m, source: {pvc: {claimName: c, path: ../x}}}"),
        "spec.model.source.pvc.path: ",
    ),
    "a final newline in a name": (_document('model: {name: "m\\n", source: {package: p}}'), "spec.model.name: "),
    "an incomplete variable": (
        _document(_MINIMAL + ", decode: {podTemplate: {env: [{value: b}]}}"),
        "spec.decode.podTemplate.env[0].name: required, but missing",
    ),
}


def _objects(value: Any, schema: Schema) -> Iterator[tuple[Any, Schema]]:
    yield value, schema
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _objects(member, schema.get("properties", {}).get(name, {}))


def _cel_messages(document: dict[str, Any]) -> list[str]:
    complete = with_defaults(prune_nulls(document), service_schema())
    return [
        rule["message"]
        for value, schema in _objects(complete, service_schema())
        for rule in schema.get("x-kubernetes-validations", [])
        if not cel.evaluate(rule["rule"], {"self": value})
    ]


@pytest.mark.parametrize("document", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_manifests_that_are_accepted(document: dict[str, Any]) -> None:
    service = parse_service(document, place=Place.CLUSTER)

    assert service.name == document["metadata"]["name"]
    assert _cel_messages(document) == []
    assert parse_service(document, place=Place.LOCAL).spec == service.spec


@pytest.mark.parametrize(("document", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_manifests_that_are_rejected(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_service(document, place=Place.CLUSTER)

    assert message in str(caught.value)


def _fit_the_schema() -> list[dict[str, Any]]:
    """The manifests that only rules can judge."""
    documents = [*ACCEPTED.values(), *(document for document, _ in REJECTED.values())]
    return [document for document in documents if not check(prune_nulls(document), strict(service_schema()))]


@pytest.mark.parametrize("document", _fit_the_schema())
def test_cel_rules_and_code_agree(document: dict[str, Any]) -> None:
    complete = with_defaults(prune_nulls(document), service_schema())
    broken = []
    for rule in RULES:
        target: Any = complete
        for name in rule.path:
            target = target[name]
        if not rule.holds(target):
            broken.append(rule.message)

    assert sorted(_cel_messages(document)) == sorted(broken)


def test_every_cel_rule_has_a_twin_at_the_same_place() -> None:
    def rules(schema: Schema, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for rule in schema.get("x-kubernetes-validations", []):
            assert "messageExpression" not in rule
            yield path, rule["message"]
        for name, member in schema.get("properties", {}).items():
            yield from rules(member, (*path, name))

    assert set(rules(service_schema(), ())) == {(rule.path, rule.message) for rule in RULES}


def test_every_field_is_described_and_bounded() -> None:
    def problems(schema: Schema, path: str) -> Iterator[str]:
        for name, member in schema.get("properties", {}).items():
            where = f"{path}.{name}"
            if not member.get("description", "").endswith("."):
                yield f"{where} has no description that is a sentence"
            if member.get("type") == "array" and "maxItems" not in member:
                yield f"{where} has no maxItems"
            if member.get("type") == "integer" and where.startswith(".spec") and not {"maximum", "enum"} & set(member):
                yield f"{where} has no maximum"
            is_text = member.get("type") == "string" and where.startswith(".spec")
            if is_text and not {"maxLength", "enum"} & set(member):
                yield f"{where} has no maxLength"
            if "additionalProperties" in member and "maxProperties" not in member:
                yield f"{where} has no maxProperties"
            yield from problems(member, where)
            yield from problems(member.get("items", {}), f"{where}[]")

    assert list(problems(service_schema(), "")) == []


def test_the_schema_is_small_enough_for_an_annotation() -> None:
    assert len(str(service_schema())) < 64 * 1024


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_service(_document(_MINIMAL + ", engine: {blockSize: 1, x: 2}, router: {policy: No}"), place=Place.LOCAL)

    assert [problem.path for problem in caught.value.problems] == [
        "spec.engine.blockSize",
        "spec.engine.x",
        "spec.router.policy",
    ]


def test_a_path_is_a_source_on_this_machine_only() -> None:
    document = _document("model: {name: m, source: {path: ./model.gguf}}")

    assert parse_service(document, place=Place.LOCAL).spec.model.source.path == "./model.gguf"
    with pytest.raises(SpecError, match=r"spec.model.source.path: unknown field"):
        parse_service(document, place=Place.CLUSTER)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "a manifest is an object"),
        ({"kind": "LLMService"}, "apiVersion: missing, kvferry.dev/v1alpha1 is required"),
        ({"apiVersion": "kvferry.dev/v1", "kind": "LLMService"}, "apiVersion: kvferry.dev/v1 given"),
        ({"apiVersion": "kvferry.dev/v1alpha1", "kind": "Pod"}, "kind: Pod given, LLMService is required"),
        ({"apiVersion": "kvferry.dev/v1alpha1", "kind": "LLMService", "spec": {}}, "metadata: required, but missing"),
        (_document(_MINIMAL) | {"specs": {}}, "specs: unknown field; did you mean spec?"),
    ],
)
def test_documents_that_are_no_service(document: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_service(document, place=Place.LOCAL)

    assert message in str(caught.value)


def test_metadata_and_status_from_an_api_server_are_no_problem() -> None:
    document = _document(_MINIMAL)
    document["metadata"] |= {"namespace": "team", "uid": "u-1", "labels": {"a": "b"}, "managedFields": [{"x": 1}]}
    document["status"] = {"next": "nothing"}

    service = parse_service(document, place=Place.CLUSTER)

    assert service.identity == "team/smollm2/u-1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not readable as YAML"),
        ("a: 1\na: 2", "key a stands twice"),
        ("1: x", "key 1 is not a text"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_files_that_are_no_yaml(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_documents(text)

    assert message in str(caught.value)


def test_yaml_timestamps_stay_texts() -> None:
    assert load_documents("restartedAt: 2026-01-02T03:04:05Z") == [{"restartedAt": "2026-01-02T03:04:05Z"}]
