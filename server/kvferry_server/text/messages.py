"""Chat messages as clients send them to chat messages as templates read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry_server.errors import BadRequestError
from kvferry_server.settings import ContentFormat

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Content part types that are text, and the key that holds it."""

MEDIA_PARTS = frozenset(
    {
        "image_url",
        "input_image",
        "image_embeds",
        "input_audio",
        "audio_url",
        "audio_embeds",
        "video_url",
        "video_embeds",
    }
)
_PAYLOAD_KEYS = (*TEXT_PARTS, *sorted(MEDIA_PARTS))


def normalise_messages(
    messages: Iterable[Mapping[str, Any]], *, content_format: ContentFormat, knows_developer_role: bool
) -> list[dict[str, Any]]:
    """Return messages ready for a template: content as text or parts, tool arguments parsed, roles the template knows.

    Raises BadRequestError for content parts that this model cannot read.
    """
    normal = [_normalise(message, content_format) for message in messages]
    if knows_developer_role or all(message["role"] != "developer" for message in normal):
        return normal
    for message in normal:
        if message["role"] == "developer":
            message["role"] = "system"
    return _merge_system(normal)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, parts joined with line breaks."""
    content = message.get("content")
    return "\n".join(part["text"] for part in _text_parts(content))


def _normalise(message: Mapping[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    parts = _text_parts(message.get("content"))
    whole: Any = parts
    if content_format is not ContentFormat.OPENAI or isinstance(message.get("content"), (str, type(None))):
        whole = "\n".join(part["text"] for part in parts)
    normal = {key: value for key, value in message.items() if value is not None} | {"content": whole}
    if "reasoning_content" in normal:
        normal.setdefault("reasoning", normal.pop("reasoning_content"))
    if "reasoning" in normal:
        # Templates look for either name.
        normal["reasoning_content"] = normal["reasoning"]
    if "tool_calls" in normal:
        normal["tool_calls"] = [_with_parsed_arguments(call) for call in normal["tool_calls"]]
    return normal


def _text_parts(content: Any) -> list[dict[str, str]]:
    """Return content as a list of text parts. Raises BadRequestError for anything that is not text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": _part_text(part)} for part in content]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") or next((key for key in _PAYLOAD_KEYS if key in part), None)
    if kind in MEDIA_PARTS:
        raise BadRequestError(
            f"A content part has type {kind!r}, but this is not a multimodal model: only text parts are accepted.",
            param="messages",
        )
    if kind not in TEXT_PARTS:
        raise BadRequestError(
            f"Unknown content part type {str(kind)[:100]!r}; accepted: {', '.join(TEXT_PARTS)}.", param="messages"
        )
    text = part.get(TEXT_PARTS[kind], part.get("text"))
    if not isinstance(text, str):
        raise BadRequestError(f"A content part of type {kind!r} needs a string {TEXT_PARTS[kind]!r}.", param="messages")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    """Return a tool call whose `arguments` is an object: templates print it with `tojson` or loop over it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with every system message merged into one at the front (most templates allow no other)."""
    system = [message for message in messages if message["role"] == "system"]
    contents = [message["content"] for message in system]
    merged: Any
    if all(isinstance(content, str) for content in contents):
        merged = "\n\n".join(contents)
    else:
        merged = [part for content in contents for part in _text_parts(content)]
    return [{**system[0], "content": merged}, *(message for message in messages if message["role"] != "system")]
