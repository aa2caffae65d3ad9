"""Reads a JSON body into a request model: content type, syntax, nesting and schema, each failing the documented way."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kvferry_server.errors import SchemaError
from kvferry_server.streaming import ClientGoneError

from .checks import shorten

Model = TypeVar("Model", bound=BaseModel)

MAX_LISTED_ERRORS = 10
MAX_LISTED_CHARS = 1000
THREAD_ABOVE_BYTES = 256 << 10
"""Larger bodies are parsed in a worker thread: they would hold up every stream of the process."""

_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{\]}]', re.DOTALL)
_UNION_BRANCH = re.compile(
    r"(?:(?:constrained-)?(?:str|int|float|bool|none)|(?:list|dict|tuple|nullable|literal|function-\w+|lax-or-strict)\[.*|[A-Z]\w*)"
)


def json_body(model: type[Model], *, max_depth: int) -> Callable[[Request], Awaitable[Model]]:
    """Return a function that reads the body of a request as `model`. It raises SchemaError and ClientGoneError."""

    async def read(request: Request) -> Model:
        check_content_type(request)
        try:
            body = await request.body()
        except ClientDisconnect as error:
            raise ClientGoneError from error
        if len(body) > THREAD_ABOVE_BYTES:
            return await anyio.to_thread.run_sync(parse, body)
        return parse(body)

    def parse(body: bytes) -> Model:
        value = parse_json(body, max_depth=max_depth)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise schema_error(
                [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            ) from error

    return read


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return what the OpenAPI document says about a body read by `json_body`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(definitions[value["$ref"].rpartition("/")[2]])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}


def check_content_type(request: Request) -> None:
    """Raise SchemaError unless the body is declared as application/json."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _one_error("content_type", "header.content-type", "only application/json is allowed", kind, param=None)


def parse_json(body: bytes, *, max_depth: int) -> Any:
    """Return the object of a JSON body. Raises SchemaError for anything else."""
    if not body.strip():
        raise _one_error("missing", "body", "Field required", None, param="body")
    _check_depth(body, max_depth)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = _parse_leniently(body)
    if not isinstance(value, dict):
        raise _one_error("model_attributes_type", "body", "The body must be an object", value, param="body")
    return value


def _parse_leniently(body: bytes) -> Any:
    """Parse with the standard library: it accepts NaN and tells where the error is."""
    try:
        value = json.loads(body)
        # Half a surrogate pair is no text that could be tokenized.
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _one_error(
            "json_invalid", f"body.{error.pos}", "JSON decode error", error.msg, param=f"body.{error.pos}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _one_error("json_invalid", "body.0", "JSON decode error", type(error).__name__, param="body.0") from error
    return value


def _check_depth(body: bytes, max_depth: int) -> None:
    """Raise SchemaError for deeper nesting; looks at the text, so that no parser recurses into it."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise _one_error(
                    "nesting", f"body.{match.start()}", f"More than {max_depth} levels of nesting", None, param="body"
                )
        elif first in b"]}":
            depth -= 1


def schema_error(errors: Iterable[Mapping[str, Any]]) -> SchemaError:
    """Return the 400 for schema errors in pydantic's form: a count, at most ten described errors, the first one's place."""
    found = list(errors)
    lines = [_line(error) for error in found[:MAX_LISTED_ERRORS]]
    if len(found) > MAX_LISTED_ERRORS:
        lines.append(f"  ... and {len(found) - MAX_LISTED_ERRORS} more")
    count = f"{len(found)} validation error{'s' if len(found) != 1 else ''}:"
    return SchemaError("\n".join([count, *lines]), param=_place(found[0]["loc"]))


def _line(error: Mapping[str, Any]) -> str:
    line = (
        f"  type={error['type']}, loc={_place(error['loc'])}, msg={error['msg']}, input={shorten(error.get('input'))}"
    )
    if error.get("ctx"):
        line += f", ctx={ {key: str(value) for key, value in error['ctx'].items()} }"
    return line[:MAX_LISTED_CHARS]


def _place(location: Iterable[Any]) -> str:
    """Return a location with dots, without the markers of union branches."""
    parts = [str(part) for n, part in enumerate(location) if n == 0 or not _is_branch(part)]
    return ".".join(parts)


def _is_branch(part: Any) -> bool:
    return isinstance(part, str) and _UNION_BRANCH.fullmatch(part) is not None


def _one_error(kind: str, place: str, message: str, value: Any, *, param: str | None) -> SchemaError:
    return SchemaError(
        f"1 validation error:\n  type={kind}, loc={place}, msg={message}, input={shorten(value)}", param=param
    )
