"""`LLM`: an engine inside the calling process, driven by the calls themselves; for scripts and offline batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from kvferry.outputs import RequestOutput
from kvferry.params import SamplingParams
from kvferry.session import Prompt, Request, Session, is_token_ids
from kvferry.settings import engine_config
from kvferry_engine.assembly import build_parts
from kvferry_engine.wire.messages import Step


class LLM:
    """One model in this process. Settings are those of `kvferry engine` (`EngineConfig`); use it from one thread.

    Enumerated settings may be given as their text, `dtype="float32"`. Close it, or use it as a context manager.

    Raises ValueError for a setting that does not exist or a value that is not allowed, kvferry_engine.errors.EngineError when
    the model cannot be loaded.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = engine_config(model, settings)
        self._steps: list[Step] = []
        self._parts = build_parts(config, send=lambda _, step: self._steps.append(step), clock=time.monotonic)
        self._session = Session(self._parts, chat_template=config.chat_template)
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts and return their outputs in order; blocks until all are done.

        One `SamplingParams` serves all prompts, or one per prompt. Raises ValueError for a prompt that cannot run; then
        none has run.
        """
        many = self._as_list(prompts)
        return self._run(many, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self._session.render(conversation, chat_template_kwargs) for conversation in conversations]  # type: ignore[arg-type]  # narrowed by the line above
        return self._run(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Any:
        """The tokenizer: `encode(text, add_special_tokens=...)` and `decode(ids, skip_special_tokens=...)`."""
        return self._session.tokenizer

    def close(self) -> None:
        """End the rank processes; the model's memory goes with this object. Idempotent."""
        self._is_closed = True
        self._parts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """Return a list of prompts; a list of numbers alone is one prompt of token ids. What is no prompt is refused later."""
        if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
            return [prompts]
        if prompts and is_token_ids(prompts):
            return [prompts]
        return list(prompts)  # type: ignore[arg-type]  # numbers among prompts are refused by the session

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or SamplingParams()] * len(prompts)
        else:
            each = list(sampling_params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} sampling_params for {len(prompts)} prompts; give one for all or one for each"
            )
        requests: list[Request] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                requests.append(self._session.submit(prompt, params))
            with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self._session.num_running:
                    self._parts.core.turn()
                    self._read(bar)
        except BaseException:
            for request in requests:
                self._session.abort(request.output.request_id)
            raise
        return [request.output for request in requests]

    def _read(self, bar: tqdm[Any]) -> None:
        steps, self._steps = self._steps, []
        before = self._session.num_running
        for step in steps:
            self._session.read(step)
        bar.update(before - self._session.num_running)
