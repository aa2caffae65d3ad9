"""The work of POST /v1/completions: prompts in any of the four forms, and choices in prompt-major order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from kvferry_engine.wire.messages import TokenLogprobs
from kvferry_server.api.checks import invalid, unsupported
from kvferry_server.api.context import CallContext
from kvferry_server.api.generation.logprobs import LogprobPrinter
from kvferry_server.api.generation.outputs import Output, Pacer, collect
from kvferry_server.api.generation.prompts import Prompt, ids_prompt, text_prompt, truncation_of
from kvferry_server.api.generation.reader import Delta
from kvferry_server.api.generation.running import Batch
from kvferry_server.api.generation.sampling import LogprobRequest
from kvferry_server.api.generation.service import GenerationService, ServedModel
from kvferry_server.api.generation.usage import count_usage, total_usage, usage_options, without_nulls
from kvferry_server.errors import BadRequestError
from kvferry_server.streaming import DONE_FRAME, ChunkWriter, data_frame, encode_json, key_value

from .protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class StartedCompletion:
    """A completion that engines have accepted; `batch` must be closed."""

    request: CompletionRequest
    model: ServedModel
    response_id: str
    created: int
    prompts: list[Prompt]
    prompt_texts: list[str]
    """Prompt texts to echo, empty when nothing is echoed."""
    batch: Batch
    printer: LogprobPrinter

    @property
    def hides_output(self) -> bool:
        """echo with max_tokens 0: one token is generated and not shown."""
        return self.request.max_tokens == 0


class CompletionService:
    """Starts completions and prints them, whole or as a stream."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def start(self, request: CompletionRequest, context: CallContext) -> StartedCompletion:
        """Check a request and submit its prompts. Raises ApiError subclasses; nothing was sent to the client yet."""
        generation = self._generation
        _check(request)
        generation.check(request)
        model = await generation.model(request.model)
        depth = request.logprobs
        plan = await generation.plan(
            request,
            model,
            logprobs=LogprobRequest(output=depth, prompt=_prompt_depth(request)),
            requested_tokens=_requested_tokens(request),
            tokens_param="max_tokens",
        )
        prompts = await self._prompts(request, model)
        texts = await _echo_texts(request, model, prompts)
        response_id = f"cmpl-{context.base_id(request)}"
        batch = await generation.start(request, model, context, response_id=response_id, prompts=prompts, plan=plan)
        return StartedCompletion(
            request=request,
            model=model,
            response_id=response_id,
            created=int(time.time()),
            prompts=prompts,
            prompt_texts=texts,
            batch=batch,
            printer=generation.printer(request, model, depth),
        )

    async def _prompts(self, request: CompletionRequest, model: ServedModel) -> list[Prompt]:
        """Return the prompts of a request in order. Raises BadRequestError."""
        inputs = prompt_inputs(request.prompt)
        limit = self._generation.settings.max_completion_prompts
        if len(inputs) > limit:
            raise BadRequestError(f"A request has at most {limit} prompts, this one has {len(inputs)}.", param="prompt")
        truncation = truncation_of(request, model.text, model.info)
        prompts = []
        for one in inputs:
            if isinstance(one, str):
                prompt = await text_prompt(
                    one,
                    text=model.text,
                    info=model.info,
                    truncation=truncation,
                    add_special_tokens=request.add_special_tokens,
                )
            else:
                prompt = ids_prompt(one, info=model.info, truncation=truncation)
            prompts.append(prompt)
        return prompts

    async def complete(self, started: StartedCompletion) -> dict[str, Any]:
        """Return the whole response. Raises EngineFailedError."""
        request, batch = started.request, started.batch
        outputs = await collect(batch, request.n)
        choices = []
        for number, of_prompt in enumerate(outputs):
            for sample, output in enumerate(of_prompt):
                choices.append(_choice(started, number, number * request.n + sample, output))
        return {
            "id": started.response_id,
            "object": "text_completion",
            "created": started.created,
            "model": started.model.name,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._generation.fingerprint(started.model),
            "usage": total_usage(batch.running, self._generation.settings),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def stream(self, started: StartedCompletion) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream, without the ones for errors. Raises EngineFailedError."""
        request, batch = started.request, started.batch
        usage = usage_options(request, self._generation.settings)
        fingerprint = self._generation.fingerprint(started.model)
        head = {
            "id": started.response_id,
            "object": "text_completion",
            "created": started.created,
            "model": started.model.name,
        }
        writer = ChunkWriter(head)
        printer = _ChoicePrinter(started)
        interval = self._generation.stream_interval(request)
        pacers = [Pacer(interval) for _ in range(len(started.prompts) * request.n)]
        fingerprint_extra = b"" if usage.in_last_chunk else key_value("system_fingerprint", fingerprint)
        async with contextlib.aclosing(batch.deltas()) as deltas:
            async for number, delta in deltas:
                index = number * request.n + delta.index
                ready = pacers[index].take(delta)
                if ready is None:
                    continue
                extra = b"" if ready.finish_reason is None else fingerprint_extra
                if usage.in_every_chunk:
                    one = batch.running[number]
                    extra += key_value("usage", count_usage(one.num_prompt_tokens, one.num_tokens(delta.index)))
                yield writer.frame(printer.choice(number, index, ready), extra)
        if usage.in_last_chunk:
            totals = without_nulls(total_usage(batch.running, self._generation.settings))
            last = {**head, "choices": [], "usage": totals, "system_fingerprint": fingerprint}
            yield data_frame(without_nulls(last))
        yield DONE_FRAME


class _ChoicePrinter:
    """Serialises the choices of a stream's chunks; keeps the text offset of every choice."""

    def __init__(self, started: StartedCompletion) -> None:
        self._started = started
        self._offsets: dict[int, int] = {}

    def choice(self, number: int, index: int, delta: Delta) -> bytes:
        started = self._started
        request = started.request
        is_first = index not in self._offsets
        self._offsets.setdefault(index, 0)
        ids, positions, text = delta.token_ids, _positions(delta.token_ids, delta.logprobs), delta.text
        shown_ids = ids
        if started.hides_output:
            ids, positions, text = [], [], ""
        if is_first and request.echo:
            ids, positions = _with_prompt(started, number, ids, positions)
            text = _prompt_text(started, number) + text
        logprobs = b"null"
        if request.logprobs is not None:
            printed, self._offsets[index] = started.printer.completion(ids, positions, self._offsets[index])
            logprobs = encode_json(printed)
        with_prompt_ids = is_first and (request.return_token_ids or request.echo)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b%b}' % (
            index,
            encode_json(text),
            logprobs,
            encode_json("length" if started.hides_output and delta.finish_reason else delta.finish_reason),
            encode_json(delta.stop_reason),
            key_value("prompt_token_ids", started.prompts[number].ids if with_prompt_ids else None),
            key_value("token_ids", shown_ids if request.return_token_ids else None),
        )


def _check(request: CompletionRequest) -> None:
    """Raise for fields that only completions have."""
    if request.prompt_embeds is not None:
        raise unsupported("A prompt of embeddings", param="prompt_embeds")
    if request.suffix:
        raise BadRequestError("`suffix` needs a model with fill-in-the-middle rendering.", param="suffix")
    if request.logprobs is not None and request.logprobs < -1:
        raise invalid("`logprobs` must be -1 or at least 0.", param="logprobs", value=request.logprobs)
    if request.logprob_token_ids is not None and request.echo and request.max_tokens == 0:
        raise BadRequestError("`logprob_token_ids` needs generated tokens.", param="logprob_token_ids")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens must be at least 1, got 0.", param="max_tokens", value=0)
    if request.stream and request.echo and request.logprobs == -1:
        raise BadRequestError("`logprobs` -1 with `echo` is not streamed.", param="logprobs")


def _requested_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    return 1 if request.max_tokens == 0 else request.max_tokens


def _prompt_depth(request: CompletionRequest) -> int | None:
    """Return how deep prompt log-probs go, for the client or for echo; streams show them only as echo."""
    if request.echo and request.logprobs is not None:
        depths = (request.logprobs, request.logprobs if request.prompt_logprobs is None else request.prompt_logprobs)
        return -1 if -1 in depths else max(depths)
    return None if request.stream else request.prompt_logprobs


def prompt_inputs(prompt: str | list[int] | list[str] | list[list[int]] | None) -> list[str | list[int]]:
    """Return the prompts of a request one by one. Raises BadRequestError when there is none."""
    if not prompt:
        raise BadRequestError("`prompt` must be a text, a list of token ids, or a list of either.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(one, int) for one in prompt):
        return [[one for one in prompt if isinstance(one, int)]]
    return [one for one in prompt if not isinstance(one, int)]


async def _echo_texts(request: CompletionRequest, model: ServedModel, prompts: list[Prompt]) -> list[str]:
    if not request.echo:
        return []
    return [
        prompt.text if prompt.text is not None else await model.text.decode(prompt.ids, skip_special_tokens=False)
        for prompt in prompts
    ]


def _prompt_text(started: StartedCompletion, number: int) -> str:
    """Return the prompt text to put in front; with return_token_ids the ids stand for it."""
    return "" if started.request.return_token_ids else started.prompt_texts[number]


def _positions(ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs | None]:
    return [None] * len(ids) if logprobs is None else list(logprobs)


def _with_prompt(
    started: StartedCompletion, number: int, ids: list[int], positions: list[TokenLogprobs | None]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return ids and log-probs with the prompt's in front."""
    prompt_ids = started.prompts[number].ids
    known = started.batch.running[number].prompt_logprobs or [None] * len(prompt_ids)
    return [*prompt_ids, *ids], [*known, *positions]


def _choice(started: StartedCompletion, number: int, index: int, output: Output) -> dict[str, Any]:
    request = started.request
    ids, positions, text = output.token_ids, _positions(output.token_ids, output.logprobs or None), output.text
    finish_reason = output.finish_reason
    if started.hides_output:
        ids, positions, text, finish_reason = [], [], "", "length"
    if request.echo:
        ids, positions = _with_prompt(started, number, ids, positions)
        text = _prompt_text(started, number) + text
    logprobs = None
    if request.logprobs is not None:
        logprobs, _ = started.printer.completion(ids, positions, 0)
    prompt_logprobs = started.batch.running[number].prompt_logprobs
    shows_prompt_logprobs = request.prompt_logprobs is not None and prompt_logprobs is not None
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if request.return_token_ids else None,
        "prompt_logprobs": started.printer.prompt(prompt_logprobs or []) if shows_prompt_logprobs else None,
        "prompt_token_ids": started.prompts[number].ids if request.return_token_ids else None,
        "routed_experts": None,
    }
