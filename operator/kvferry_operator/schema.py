"""The LLMService schema as `kvferry up` uses it: found in wheel or repository, made strict, its errors made readable.

The API server prunes nulls, sets defaults and checks the same file; these functions do the same to a manifest that
never reaches a cluster. `rules` adds what a schema cannot say.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from kvferry_operator.errors import Problem

Schema = dict[str, Any]
_MAX_SHOWN = 60


def crd_text() -> str:
    """Return the CustomResourceDefinition as YAML text: the wheel's copy, else the repository's file."""
    packaged = Path(__file__).parent / "crds" / "llmservice.yaml"
    in_repository = Path(__file__).parents[2] / "crds" / "llmservice.yaml"
    return (packaged if packaged.exists() else in_repository).read_text(encoding="utf-8")


@cache
def service_schema() -> Schema:
    """Return the openAPIV3Schema of the stored version. Callers must not change it."""
    definition = yaml.safe_load(crd_text())
    versions = definition["spec"]["versions"]
    schema: Schema = next(version for version in versions if version["storage"])["schema"]["openAPIV3Schema"]
    return schema


def strict(schema: Schema) -> Schema:
    """Return a JSON schema equal to a structural one, except that unknown fields are errors."""
    result = copy.deepcopy(schema)
    for node in _nodes(result):
        if "pattern" in node:
            # A Python `$` also matches before a final newline; Go's does not.
            node["pattern"] = node["pattern"].removesuffix("$") + r"\Z"
        if node.get("x-kubernetes-list-type") == "set":
            node["uniqueItems"] = True
        open_object = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
        if "properties" in node and not open_object:
            node["additionalProperties"] = False
    # Standard metadata has many more fields than the schema restricts; the API server itself asks for a name.
    result["properties"]["metadata"].pop("additionalProperties", None)
    result["properties"]["metadata"]["required"] = ["name"]
    result["required"] = ["metadata", "spec"]
    return result


def prune_nulls(value: Any) -> Any:
    """Return `value` without object members that are null, as the API server drops them."""
    if isinstance(value, Mapping):
        return {key: prune_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [prune_nulls(item) for item in value]
    return value


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return `value` with the schema's defaults in absent members, outermost first."""
    if isinstance(value, Mapping):
        members = schema.get("properties", {})
        filled = dict(value)
        for name, member in members.items():
            if name not in filled and "default" in member:
                filled[name] = copy.deepcopy(member["default"])
        return {name: with_defaults(item, members.get(name, {})) for name, item in filled.items()}
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


def check(document: Any, schema: Schema) -> list[Problem]:
    """Return what a strict schema finds wrong with a document: one problem a place, sorted by place."""
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    # A value of the wrong type breaks other rules too; only the type is worth a line.
    errors.sort(key=lambda error: error.validator == "type")
    found = {problem.path: problem for error in errors for problem in _describe(error)}
    return [found[path] for path in sorted(found)]


def _nodes(schema: Schema) -> Iterator[Schema]:
    yield schema
    children = [*schema.get("properties", {}).values()]
    children += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    for child in children:
        yield from _nodes(child)


def _describe(error: jsonschema.ValidationError) -> Iterator[Problem]:
    path = _dotted(error.absolute_path)
    rule = error.validator
    limit: Any = error.validator_value
    instance: Any = error.instance
    given = _shown(instance)
    if rule == "additionalProperties" and isinstance(error.schema, Mapping):
        allowed = list(error.schema.get("properties", {}))
        for name in [name for name in instance if name not in allowed]:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
            yield Problem(path=_dotted([*error.absolute_path, name]), message=f"unknown field; {hint}")
        return
    if rule == "required":
        for name in [name for name in limit if name not in instance]:
            yield Problem(path=_dotted([*error.absolute_path, name]), message="required, but missing")
        return
    messages = {
        "type": f"{given} given, {_a(limit)} is required",
        "anyOf": f"{given} given, a number or a text such as 4Gi is required",
        "enum": f"{given} given, allowed: {', '.join(str(item) for item in limit) if rule == 'enum' else ''}",
        "minimum": f"{given} given, at least {limit} is required",
        "maximum": f"{given} given, at most {limit} is allowed",
        "pattern": f"{given} given, it must match {str(limit).removesuffix(chr(92) + 'Z')}$",
        "minLength": "must not be empty",
        "maxLength": f"too long, at most {limit} characters are allowed",
        "minItems": f"at least {limit} item is required",
        "maxItems": f"too many items, at most {limit} are allowed",
        "maxProperties": f"too many members, at most {limit} are allowed",
        "uniqueItems": "items must differ",
    }
    yield Problem(path=path, message=messages.get(str(rule), error.message))


def _dotted(path: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = str(value)
    text = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
    return f'"{text}"' if isinstance(value, str) else text


def _a(type_name: Any) -> str:
    names = {
        "object": "an object",
        "array": "a list",
        "string": "a text",
        "integer": "a whole number",
        "boolean": "true or false",
    }
    return names.get(str(type_name), str(type_name))
