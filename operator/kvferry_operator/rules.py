"""Rules between fields of an LLMService, for manifests that no API server checks.

Each is the twin of an x-kubernetes-validations entry of the CRD, with the same place and message; a test evaluates both
over one table of manifests. They run after defaults are set, as the API server's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry_operator.errors import Problem

LOCAL_SOURCE = "path"
"""Member of model.source that only `kvferry up` knows; the CRD does not have it."""

SOURCES = ("package", "hf", "pvc", "image", LOCAL_SOURCE)
_CHILD_SUFFIXES = ("-prefill", "-decode", "-router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`holds` gets the object at `path` and tells whether it is legal."""

    path: tuple[str, ...]
    message: str
    holds: Callable[[Any], bool]


RULES = (
    Rule(
        path=(),
        message="metadata.name must not end in -prefill, -decode or -router, which name the objects of each role",
        holds=lambda service: not service["metadata"]["name"].endswith(_CHILD_SUFFIXES),
    ),
    Rule(
        path=("spec",),
        message="decode.replicas must be at least 1 unless suspend is true",
        holds=lambda spec: spec["suspend"] or spec["decode"]["replicas"] >= 1,
    ),
    Rule(
        path=("spec",),
        message="disaggregation.mode Always needs a prefill section",
        holds=lambda spec: spec["disaggregation"]["mode"] != "Always" or "prefill" in spec,
    ),
    Rule(
        path=("spec", "model"),
        message="aliases must not repeat name",
        holds=lambda model: model["name"] not in model.get("aliases", ()),
    ),
    Rule(
        path=("spec", "model", "source"),
        message="exactly one source is required",
        holds=lambda source: sum(member in source for member in SOURCES) == 1,
    ),
)


def check_rules(document: Mapping[str, Any]) -> list[Problem]:
    """Return the rules a document breaks; it must fit the schema and have its defaults."""
    problems = []
    for rule in RULES:
        target: Any = document
        for name in rule.path:
            target = target[name]
        if not rule.holds(target):
            problems.append(Problem(path=".".join(rule.path), message=rule.message))
    return problems
