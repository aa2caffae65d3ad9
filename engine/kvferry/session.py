"""Requests of a Python program against an engine core in the same process: prompts in, growing `RequestOutput`s out.

No threads and no clock here; `LLM` drives it directly, `AsyncLLM` from its engine thread.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from kvferry.outputs import CompletionOutput, Logprob, RequestOutput
from kvferry.params import SamplingParams
from kvferry_engine.assembly import EngineParts
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.packing import pack_ids, unpack_ids
from kvferry_server.settings import ContentFormat
from kvferry_server.text.detokenizer import Detokenizer
from kvferry_server.text.messages import normalise_messages
from kvferry_server.text.stop_strings import StopStrings
from kvferry_server.text.templates import ChatTemplateOptions, ChatTemplates
from kvferry_server.text.tokenizer import ModelTokenizer

ORIGIN = "program"
RENDER_TIMEOUT_S = 30.0

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Text side of one sequence."""

    output: CompletionOutput
    detokenizer: Detokenizer
    stops: StopStrings | None


@dataclass(slots=True, kw_only=True)
class Request:
    """A running request; `output` grows."""

    output: RequestOutput
    params: SamplingParams
    readers: dict[int, _Reader] = field(default_factory=dict)
    """By engine slot; a reader leaves when its sequence ends."""


def is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Whether `value` is a sequence of int32 numbers, an empty one included."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(isinstance(token, int) and -(2**31) <= token < 2**31 for token in value)
    )


def _described(prompt: object) -> str:
    if isinstance(prompt, Mapping):
        return "a mapping with " + (
            ", ".join(f"{key} ({type(value).__name__})" for key, value in prompt.items()) or "nothing"
        )
    return f"{type(prompt).__name__} {reprlib.repr(prompt)}"


class Session:
    """Submits to `parts.core` and reads its STEP messages; hand `read` to the core as its `send`."""

    def __init__(self, parts: EngineParts, *, chat_template: str | None = None) -> None:
        self._core = parts.core
        self._assets = parts.assets
        self._max_model_len = parts.model_info.max_model_len
        self.boot = "program"
        self.tokenizer = ModelTokenizer(parts.assets)
        self._templates = ChatTemplates(
            parts.assets, override=chat_template, content_format=ContentFormat.AUTO, timeout_s=RENDER_TIMEOUT_S
        )
        self._running: dict[str, Request] = {}
        self._by_slot: dict[int, Request] = {}

    @property
    def num_running(self) -> int:
        """Requests without their last token."""
        return len(self._running)

    def prompt_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return (text if given, ids). Raises ValueError for anything else."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None and isinstance(text, str):
                return self.prompt_of(text)
            if is_token_ids(ids) and (text is None or isinstance(text, str)):
                return text, list(ids)
        elif is_token_ids(prompt):
            return None, list(prompt)
        raise ValueError(
            "a prompt is text, a list of token ids, or a mapping with prompt (text) or prompt_token_ids (a list of token "
            f"ids); got {_described(prompt)}"
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a chat, ready for the answer. Raises the template's error."""
        options = ChatTemplateOptions(variables=dict(template_kwargs or {}))
        compiled = self._templates.prepare(options)
        normal = normalise_messages(
            messages, content_format=compiled.content_format, knows_developer_role=compiled.knows_developer_role
        )
        return self.tokenizer.encode(self._templates.render(compiled, normal, options), add_special_tokens=False)

    def submit(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None) -> Request:
        """Start a request. Raises ValueError with the engine's words when it refuses it."""
        text, ids = self.prompt_of(prompt)
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the context of {self._max_model_len} leaves no room for output"
            )
        rid = request_id or uuid.uuid4().hex
        if rid in self._running:
            raise ValueError(f"request id {rid!r} is running already; give another one or none")
        sampling = params.to_wire(
            room=self._max_model_len - len(ids),
            assets=self._assets,
            encode=lambda word: self.tokenizer.encode(word, add_special_tokens=False),
        )
        sequences = [wire.SubmitSequence(index=index, seed=seed) for index, seed in enumerate(params.seeds())]
        answer = self._core.submit(
            ORIGIN,
            wire.Submit(
                rid=rid,
                attempt=0,
                engine_boot=self.boot,
                prompt_ids=pack_ids(ids),
                sequences=sequences,
                sampling=sampling,
            ),
        )
        if isinstance(answer, wire.Rejected):
            raise ValueError(answer.message)
        output = RequestOutput(
            request_id=rid,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(index=index) for index in range(params.n)],
        )
        request = Request(output=output, params=params)
        for one, slot in zip(output.outputs, answer.slots, strict=True):
            if params.logprobs is not None:
                one.logprobs, one.cumulative_logprob = [], 0.0
            request.readers[slot] = _Reader(
                output=one,
                detokenizer=self.tokenizer.detokenizer(ids, skip_special_tokens=params.skip_special_tokens),
                stops=StopStrings(params.stops, include=params.include_stop_str_in_output) if params.stops else None,
            )
            self._by_slot[slot] = request
        self._running[rid] = request
        return request

    def abort(self, request_id: str) -> Request | None:
        """Stop a request; what it produced so far is its output, with finish_reason abort."""
        request = self._running.get(request_id)
        if request is None:
            return None
        self._core.abort(request_id, None)
        for slot in list(request.readers):
            self._finish(request, slot, "abort", None)
        return request

    def read(self, step: wire.Step) -> list[Request]:
        """Take a STEP message; return the requests that changed."""
        slots, counts = unpack_ids(step.slots), unpack_ids(step.counts)
        ids = unpack_ids(step.token_ids)
        changed: dict[str, Request] = {}
        start = 0
        for slot, count in zip(slots, counts, strict=True):
            tokens = ids[start : start + count]
            start += count
            request = self._by_slot.get(slot)
            if request is None:
                continue
            changed[request.output.request_id] = request
            if slot in step.reports:
                request.output.num_cached_tokens = step.reports[slot].cached_tokens
            if slot in step.prompt_logprobs:
                request.output.prompt_logprobs = [
                    None if entry is None else self._logprobs(entry) for entry in step.prompt_logprobs[slot]
                ]
            self._read_tokens(request, slot, tokens, step.logprobs.get(slot), step.finished.get(slot))
        return list(changed.values())

    def _read_tokens(
        self,
        request: Request,
        slot: int,
        tokens: list[int],
        logprobs: list[wire.TokenLogprobs] | None,
        finish: wire.Finish | None,
    ) -> None:
        reader = request.readers[slot]
        output, params = reader.output, request.params
        is_stop = finish is not None and finish.reason is wire.FinishReason.STOP
        for position, token in enumerate(tokens):
            output.token_ids.append(token)
            if logprobs is not None and output.logprobs is not None and output.cumulative_logprob is not None:
                output.logprobs.append(self._logprobs(logprobs[position]))
                output.cumulative_logprob += logprobs[position].values[0]
            if is_stop and position == len(tokens) - 1 and not params.include_stop_str_in_output:
                break
            piece = reader.detokenizer.push(token)
            if reader.stops is not None and len(output.token_ids) > params.min_tokens:
                cut = reader.stops.push(piece)
                output.text += cut.text
                if cut.stop is not None:
                    self._core.abort(request.output.request_id, [output.index])
                    self._finish(request, slot, "stop", cut.stop)
                    return
            else:
                output.text += piece
        if finish is not None:
            tail = reader.detokenizer.flush()
            if reader.stops is not None:
                # The text that the stop strings hold back stands before the detokenizer's.
                tail = reader.stops.flush() + tail
            output.text += tail
            self._finish(request, slot, str(finish.reason), finish.stop_reason)

    def _finish(self, request: Request, slot: int, reason: str, stop_reason: int | str | None) -> None:
        output = request.readers.pop(slot).output
        output.finish_reason, output.stop_reason = reason, stop_reason
        self._by_slot.pop(slot, None)
        if not request.readers:
            request.output.finished = True
            self._running.pop(request.output.request_id, None)

    def _logprobs(self, entry: wire.TokenLogprobs) -> dict[int, Logprob]:
        ids, ranks = unpack_ids(entry.ids), unpack_ids(entry.ranks)
        return {
            token: Logprob(value, rank, self.tokenizer.decode([token], skip_special_tokens=False))
            for token, value, rank in zip(ids, entry.values, ranks, strict=True)
        }
