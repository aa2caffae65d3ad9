"""The work of /tokenize and /detokenize: the same text path that generation uses, shown."""

from __future__ import annotations

from typing import Any

from kvferry_server.api.chat_completions.rendering import message_dicts, template_options
from kvferry_server.api.generation.service import GenerationService
from kvferry_server.errors import BadRequestError, SchemaError

from .protocol import DetokenizeRequest, TokenizeRequest


class TokenizeService:
    """Text to ids and back."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Return the ids of a prompt or of a rendered conversation; there is no length limit but the body's."""
        if request.prompt is None and request.messages is None:
            raise SchemaError(
                "1 validation error:\n  type=missing, loc=body.prompt, msg=`prompt` or `messages` is required",
                param="body.prompt",
            )
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(request, name):
                raise BadRequestError(f"`{name}` is not accepted from requests.", param=name)
        model = await self._generation.model(request.model, task=None)
        if request.messages is not None:
            options = template_options(request, request.messages, self._generation.settings)
            text = await model.text.render(message_dicts(request.messages), options)
            add_special_tokens = bool(request.add_special_tokens)
        else:
            text = request.prompt or ""
            add_special_tokens = request.add_special_tokens is not False
        ids = await model.text.encode(text, add_special_tokens=add_special_tokens)
        return {
            "count": len(ids),
            "max_model_len": model.info.max_model_len,
            "tokens": ids,
            "token_strs": model.text.tokenizer.tokens(ids) if request.return_token_strs else None,
        }

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of ids, special tokens included; ids outside the vocabulary give nothing."""
        model = await self._generation.model(request.model, task=None)
        return {"prompt": await model.text.decode(request.tokens, skip_special_tokens=False)}
