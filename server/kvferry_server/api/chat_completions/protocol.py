"""Body of POST /v1/chat/completions, and the template fields that other routes share with it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from kvferry_server.api.generation.protocol import GenerationFields, number_only


class ChatMessage(BaseModel):
    """One message; unknown roles and keys go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None


class TemplateFields(BaseModel):
    """What a request says to its chat template besides the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[dict[str, Any]] | None = None


class ChatCompletionRequest(TemplateFields, GenerationFields):
    """A conversation to be answered."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, number_only("top_logprobs")] = 0
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    add_special_tokens: bool = False
    return_prompt_text: bool | None = None
