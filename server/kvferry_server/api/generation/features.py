"""Refuses what a request asks for and this server does not do, by name; nothing is silently ignored.

Also the cheap checks of shared fields that need no model: they run before anything else.
"""

from __future__ import annotations

from typing import Any

from kvferry_server.api.checks import invalid, unsupported
from kvferry_server.errors import BadRequestError, SchemaError

from .protocol import GenerationFields

MAX_CACHE_SALT_CHARS = 128
MAX_REQUEST_ID_CHARS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_CHARS = 10_000


def refuse_unsupported(fields: GenerationFields) -> None:
    """Raise NotImplementedByModelError (501) or BadRequestError for features of the request that do not exist here."""
    response_format = fields.response_format
    if response_format is not None:
        _refuse_response_format(response_format)
    if fields.structured_outputs is not None:
        if not isinstance(fields.structured_outputs, dict):
            raise invalid(
                "`structured_outputs` must be an object.", param="structured_outputs", value=fields.structured_outputs
            )
        raise unsupported("Structured output", param="structured_outputs")
    if fields.use_beam_search:
        raise unsupported("Beam search", param="use_beam_search")
    if fields.thinking_token_budget not in (None, -1):
        raise unsupported("A thinking budget", param="thinking_token_budget")
    if fields.watermarking:
        raise unsupported("Watermarking", param="watermarking")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(fields, name):
            raise unsupported("Transfer by the client (kvferry moves KV by itself)", param=name)
    if fields.routed_experts_prompt_start:
        raise unsupported("Capture of routed experts", param="routed_experts_prompt_start")
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(fields, name):
            raise BadRequestError(f"`{name}` is not accepted from requests.", param=name)


def _refuse_response_format(response_format: dict[str, Any]) -> None:
    kind = response_format.get("type")
    if kind == "text":
        return
    if kind == "json_schema" and not response_format.get("json_schema"):
        raise BadRequestError("`response_format` json_schema needs `json_schema`.", param="response_format")
    if kind not in ("json_object", "json_schema", "structural_tag"):
        raise invalid("Unknown `response_format` type.", param="response_format", value=kind)
    raise unsupported(f"response_format {kind}", param="response_format")


def check_shared_fields(fields: GenerationFields, *, max_stop_strings: int) -> None:
    """Raise BadRequestError for shared fields that are wrong whatever the model."""
    if fields.stream_options is not None and fields.stream_options.model_fields_set and not fields.stream:
        raise BadRequestError("`stream_options` needs `stream`.", param="stream_options")
    if fields.stream_interval is not None and fields.stream_interval < 1:
        raise invalid("`stream_interval` must be at least 1.", param="stream_interval", value=fields.stream_interval)
    _check_stop(fields, max_stop_strings)
    _check_cache_salt(fields.cache_salt)
    if fields.request_id is None:
        raise invalid("`request_id` may not be null.", param="request_id", value=None)
    if len(fields.request_id) > MAX_REQUEST_ID_CHARS:
        raise invalid("`request_id` is too long.", param="request_id", value=fields.request_id)
    if any(not word for word in fields.bad_words):
        raise invalid("`bad_words` may not contain an empty string.", param="bad_words", value="")
    _check_logprob_fields(fields)


def _check_stop(fields: GenerationFields, max_stop_strings: int) -> None:
    stops = stop_strings(fields)
    if len(stops) > max_stop_strings:
        raise SchemaError(
            f"1 validation error:\n  type=too_long, loc=body.stop, msg=At most {max_stop_strings} stop strings are allowed",
            param="body.stop",
        )
    if any(not stop for stop in stops):
        raise invalid("`stop` may not contain an empty string.", param="stop", value="")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise invalid(f"A stop string has at most {MAX_STOP_CHARS} characters.", param="stop", value=fields.stop)


def _check_cache_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not salt or len(salt) > MAX_CACHE_SALT_CHARS or any(character in "@/\\\0" for character in salt):
        raise invalid(
            f"`cache_salt` must have 1 to {MAX_CACHE_SALT_CHARS} characters, none of them @, slash, backslash or NUL.",
            param="cache_salt",
            value=salt,
        )


def _check_logprob_fields(fields: GenerationFields) -> None:
    depth = fields.prompt_logprobs
    if depth is not None:
        if depth < -1:
            raise invalid("`prompt_logprobs` must be -1 or at least 0.", param="prompt_logprobs", value=depth)
        if fields.stream and depth != 0:
            raise invalid("`prompt_logprobs` must be 0 in streams.", param="prompt_logprobs", value=depth)
    if fields.logprob_token_ids is not None and len(fields.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise invalid(
            f"`logprob_token_ids` takes at most {MAX_LOGPROB_TOKEN_IDS} ids.",
            param="logprob_token_ids",
            value=fields.logprob_token_ids,
        )


def stop_strings(fields: GenerationFields) -> list[str]:
    """Return the stop strings of a request as a list."""
    if fields.stop is None:
        return []
    return [fields.stop] if isinstance(fields.stop, str) else fields.stop
