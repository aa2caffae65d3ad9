"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvferry_server.api.generation.protocol import GenerationFields, number_only

TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(GenerationFields):
    """A prompt (text, ids, or lists of either) to be continued as it is."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    max_tokens: int | None = 16
    n: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]  # null is refused here, accepted by chat
    logprobs: Annotated[int | None, number_only("logprobs")] = None
    add_special_tokens: bool = True

    # Refused when used.
    prompt_embeds: Any = None
    suffix: str | None = None
