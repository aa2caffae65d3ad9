"""The work of POST /v1/chat/completions: a conversation to one prompt, and its n answers, whole or as a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from kvferry_server.api.checks import invalid
from kvferry_server.api.context import CallContext
from kvferry_server.api.generation.logprobs import LogprobPrinter
from kvferry_server.api.generation.outputs import Output, Pacer, collect
from kvferry_server.api.generation.prompts import Prompt, text_prompt, truncation_of
from kvferry_server.api.generation.running import Batch
from kvferry_server.api.generation.sampling import LogprobRequest
from kvferry_server.api.generation.service import GenerationService, ServedModel
from kvferry_server.api.generation.usage import count_usage, total_usage, usage_options, without_nulls
from kvferry_server.errors import BadRequestError
from kvferry_server.streaming import DONE_FRAME, data_frame
from kvferry_server.text.messages import message_text

from .chunks import ChatChunkPrinter
from .protocol import ChatCompletionRequest
from .rendering import message_dicts, template_options


@dataclass(slots=True, kw_only=True)
class StartedChat:
    """A chat that an engine has accepted; `batch` must be closed."""

    request: ChatCompletionRequest
    model: ServedModel
    response_id: str
    created: int
    prompt: Prompt
    role: str
    echo_text: str
    batch: Batch
    printer: LogprobPrinter


class ChatService:
    """Starts chats and prints them, whole or as a stream."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def start(self, request: ChatCompletionRequest, context: CallContext) -> StartedChat:
        """Check a request, render it and submit it. Raises ApiError subclasses; nothing was sent to the client yet."""
        generation = self._generation
        options = template_options(request, request.messages, generation.settings)
        _check(request)
        generation.check(request)
        model = await generation.model(request.model)
        depth = _output_depth(request)
        uses_new_name = request.max_completion_tokens is not None
        plan = await generation.plan(
            request,
            model,
            logprobs=LogprobRequest(output=depth, output_param="top_logprobs", prompt=_prompt_depth(request, depth)),
            requested_tokens=request.max_completion_tokens if uses_new_name else request.max_tokens,
            tokens_param="max_completion_tokens" if uses_new_name else "max_tokens",
        )
        messages = message_dicts(request.messages)
        prompt = await text_prompt(
            await model.text.render(messages, options),
            text=model.text,
            info=model.info,
            truncation=truncation_of(request, model.text, model.info),
            add_special_tokens=request.add_special_tokens,
        )
        role = generation.settings.response_role if options.add_generation_prompt else request.messages[-1].role
        echoes = request.echo and request.messages[-1].role == role
        response_id = f"chatcmpl-{context.base_id(request)}"
        batch = await generation.start(request, model, context, response_id=response_id, prompts=[prompt], plan=plan)
        return StartedChat(
            request=request,
            model=model,
            response_id=response_id,
            created=int(time.time()),
            prompt=prompt,
            role=role,
            echo_text=message_text(messages[-1]) if echoes else "",
            batch=batch,
            printer=generation.printer(request, model, depth),
        )

    async def complete(self, started: StartedChat) -> dict[str, Any]:
        """Return the whole response. Raises EngineFailedError."""
        request, batch = started.request, started.batch
        outputs = await collect(batch, request.n or 1)
        prompt_logprobs = batch.running[0].prompt_logprobs
        return {
            "id": started.response_id,
            "object": "chat.completion",
            "created": started.created,
            "model": started.model.name,
            "choices": [_choice(started, index, output) for index, output in enumerate(outputs[0])],
            "service_tier": None,
            "system_fingerprint": self._generation.fingerprint(started.model),
            "usage": total_usage(batch.running, self._generation.settings),
            "prompt_logprobs": None if prompt_logprobs is None else started.printer.prompt(prompt_logprobs),
            "prompt_token_ids": started.prompt.ids if request.return_token_ids else None,
            "prompt_text": started.prompt.text if request.return_prompt_text else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def stream(self, started: StartedChat) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream, without the ones for errors. Raises EngineFailedError."""
        request, running = started.request, started.batch.running[0]
        usage = usage_options(request, self._generation.settings)
        fingerprint = self._generation.fingerprint(started.model)
        head = {
            "id": started.response_id,
            "object": "chat.completion.chunk",
            "created": started.created,
            "model": started.model.name,
        }
        chunks = ChatChunkPrinter(
            head,
            logprobs=started.printer if request.logprobs else None,
            shows_token_ids=bool(request.return_token_ids),
            fingerprint=None if usage.in_last_chunk else fingerprint,
        )
        n = request.n or 1
        interval = self._generation.stream_interval(request)
        pacers = [Pacer(interval) for _ in range(n)]

        def usage_of(num_tokens: int) -> dict[str, Any] | None:
            return count_usage(running.num_prompt_tokens, num_tokens) if usage.in_every_chunk else None

        has_begun = False
        async with contextlib.aclosing(started.batch.deltas()) as deltas:
            async for _, delta in deltas:
                if not has_begun:
                    has_begun = True
                    for index in range(n):
                        yield chunks.role(
                            index,
                            started.role,
                            prompt_ids=started.prompt.ids if request.return_token_ids else None,
                            prompt_text=started.prompt.text if request.return_prompt_text else None,
                            usage=usage_of(0),
                        )
                        if started.echo_text:
                            yield chunks.echo(index, started.echo_text, usage=usage_of(0))
                ready = pacers[delta.index].take(delta)
                frame = chunks.delta(ready, usage=usage_of(running.num_tokens(delta.index))) if ready else None
                if frame is not None:
                    yield frame
        if usage.in_last_chunk:
            totals = without_nulls(total_usage(started.batch.running, self._generation.settings))
            yield data_frame(without_nulls({**head, "choices": [], "usage": totals, "system_fingerprint": fingerprint}))
        yield DONE_FRAME


def _check(request: ChatCompletionRequest) -> None:
    """Raise BadRequestError for fields that only chat has."""
    if request.tool_choice not in (None, "none"):
        raise invalid("`tool_choice` needs `tools`.", param="tool_choice", value=request.tool_choice)
    top = request.top_logprobs or 0
    if top < -1:
        raise invalid("`top_logprobs` must be -1 or at least 0.", param="top_logprobs", value=top)
    if top != 0 and not request.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`.", param="top_logprobs", value=top)
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise invalid(f"{name} must be at least 1, got {value}.", param=name, value=value)
    if request.continue_final_message and not message_text(request.messages[-1].model_dump()):
        raise BadRequestError("The final message has no text to continue.", param="continue_final_message")


def _output_depth(request: ChatCompletionRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _prompt_depth(request: ChatCompletionRequest, output_depth: int | None) -> int | None:
    """Return how deep prompt log-probs go; echo asks for them too, and streams never show them."""
    if request.stream:
        return None
    if request.prompt_logprobs is None and request.echo:
        return output_depth or 0
    return request.prompt_logprobs


def _choice(started: StartedChat, index: int, output: Output) -> dict[str, Any]:
    request = started.request
    return {
        "index": index,
        "message": {
            "role": started.role,
            "content": started.echo_text + output.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": started.printer.chat(output.logprobs) if request.logprobs else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if request.return_token_ids else None,
        "routed_experts": None,
    }
