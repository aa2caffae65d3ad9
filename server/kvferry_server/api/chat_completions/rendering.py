"""The template fields of a chat request to template options: what is trusted, what wins, what contradicts itself."""

from __future__ import annotations

from typing import Any

from kvferry_server.errors import BadRequestError
from kvferry_server.settings import RouterSettings
from kvferry_server.text.templates import ChatTemplateOptions

from .protocol import ChatMessage, TemplateFields

RESERVED_VARIABLES = frozenset(
    {"tokenize", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Variables that have a field of their own; in `chat_template_kwargs` they are dropped."""


def template_options(
    fields: TemplateFields, messages: list[ChatMessage], settings: RouterSettings
) -> ChatTemplateOptions:
    """Return the options for a request's template. Raises BadRequestError."""
    if not messages:
        raise BadRequestError("`messages` must not be empty.", param="messages")
    if fields.tools is not None and not fields.tools:
        raise BadRequestError("`tools` must not be an empty list.", param="tools")
    if fields.tools:
        raise BadRequestError("Tools are not supported by this server.", param="tools")
    given = fields.chat_template_kwargs or {}
    if not settings.trust_request_chat_template and (fields.chat_template is not None or "chat_template" in given):
        raise BadRequestError(
            "A chat template in a request needs a server with --trust-request-chat-template.", param="chat_template"
        )
    variables = {**settings.default_chat_template_kwargs, **given}
    template = variables.pop("chat_template", None)
    _add_reasoning_effort(fields, given, variables)
    return ChatTemplateOptions(
        add_generation_prompt=_adds_generation_prompt(fields),
        continue_final_message=fields.continue_final_message,
        documents=fields.documents,
        chat_template=fields.chat_template or (template if isinstance(template, str) else None),
        variables={name: value for name, value in variables.items() if name not in RESERVED_VARIABLES},
    )


def message_dicts(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages with the keys that were sent."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def _adds_generation_prompt(fields: TemplateFields) -> bool:
    """Return whether the assistant's turn is opened; a continued message says by itself that it is not."""
    if not fields.continue_final_message:
        return fields.add_generation_prompt
    if fields.add_generation_prompt and "add_generation_prompt" in fields.model_fields_set:
        raise BadRequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other.", param="continue_final_message"
        )
    return False


def _add_reasoning_effort(fields: TemplateFields, given: dict[str, Any], variables: dict[str, Any]) -> None:
    if fields.reasoning_effort is None:
        return
    variables.setdefault("reasoning_effort", fields.reasoning_effort)
    if "enable_thinking" not in given:
        variables["enable_thinking"] = fields.reasoning_effort != "none"
