"""Text or ids of a request to the ids an engine gets, with the length rules applied."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.wire.messages import ModelInfo
from kvferry_server.api.checks import invalid
from kvferry_server.errors import BadRequestError
from kvferry_server.text.model_text import ModelText

from .protocol import GenerationFields


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of one prompt; `text` is what the client sent (or the template rendered), None when it sent ids."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep at most `limit` tokens; None: all. `side` left drops the beginning."""

    limit: int | None
    side: str

    def cut(self, ids: list[int]) -> list[int]:
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self.side == "left":
            return ids[len(ids) - self.limit :]
        return ids[: self.limit]


def truncation_of(fields: GenerationFields, text: ModelText, info: ModelInfo) -> Truncation:
    """Return the truncation a request asks for. Raises BadRequestError above the context length."""
    limit = fields.truncate_prompt_tokens
    if limit == -1:
        limit = info.max_model_len
    if limit is not None and limit > info.max_model_len:
        raise invalid(
            f"`truncate_prompt_tokens` is larger than the maximum context length of {info.max_model_len} tokens.",
            param="truncate_prompt_tokens",
            value=limit,
        )
    return Truncation(limit, fields.truncation_side or text.tokenizer.truncation_side)


async def text_prompt(
    value: str, *, text: ModelText, info: ModelInfo, truncation: Truncation, add_special_tokens: bool
) -> Prompt:
    """Tokenize a prompt. Raises BadRequestError when it is too long (hopeless texts are not tokenized at all) or empty."""
    longest = info.max_model_len * text.tokenizer.max_token_chars
    if truncation.limit is None and len(value) > longest:
        raise invalid(
            f"This model's maximum context length is {info.max_model_len} tokens; a text of {len(value)} characters "
            f"is longer than that at {text.tokenizer.max_token_chars} characters per token.",
            param="input_text",
            value=len(value),
        )
    ids = await text.encode(value, add_special_tokens=add_special_tokens)
    cut = truncation.cut(ids)
    return _checked(Prompt(cut, value if cut is ids else None), info)


def ids_prompt(ids: list[int], *, info: ModelInfo, truncation: Truncation) -> Prompt:
    """Check a prompt given as ids. Raises BadRequestError: outside the vocabulary, too long, empty."""
    if ids and max(ids) >= info.vocab_size:
        raise invalid(
            f"Token id {max(ids)} is out of vocabulary (size {info.vocab_size}).", param="prompt", value=max(ids)
        )
    return _checked(Prompt(truncation.cut(ids)), info)


def _checked(prompt: Prompt, info: ModelInfo) -> Prompt:
    if not prompt.ids:
        raise BadRequestError("The prompt is empty: it must have at least one token.", param="prompt")
    if len(prompt.ids) > info.max_model_len:
        raise invalid(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt has "
            f"{len(prompt.ids)} tokens. Please reduce the length of the input.",
            param="input_tokens",
            value=len(prompt.ids),
        )
    return prompt
