"""Bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvferry_server.api.chat_completions.protocol import ChatMessage, TemplateFields
from kvferry_server.api.generation.protocol import INT64_MAX


class TokenizeRequest(TemplateFields):
    """Either `prompt` or `messages`; the template fields belong to the second form."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    return_token_strs: bool | None = False
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """Token ids to be shown as text."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT64_MAX)]]
