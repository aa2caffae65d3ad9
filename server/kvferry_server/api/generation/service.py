"""The work every generating dialect shares: find the model, check sampling, start prompts at the engines.

A dialect checks its own fields, turns its input into `Prompt`s, calls `start`, and prints the deltas its own way.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvferry_engine.wire.messages import ModelInfo, Sampling
from kvferry_server.api.context import CallContext
from kvferry_server.errors import NotFoundError, NotImplementedByModelError, ServiceUnavailableError
from kvferry_server.metrics import RouterMetrics
from kvferry_server.requests import EngineRequest, Gateway, ModelView
from kvferry_server.settings import FingerprintMode, RouterSettings
from kvferry_server.text.model_text import ModelText, TextLibrary

from .features import check_shared_fields, refuse_unsupported, stop_strings
from .logprobs import LogprobPrinter
from .prompts import Prompt
from .protocol import GenerationFields
from .reader import SequenceReader, TextOptions
from .running import Batch, Running, start_all
from .sampling import LogprobRequest, SamplingPlan, bad_words, draw_seeds, plan_sampling, sampling_defaults

GENERATE_TASK = "generate"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model a request talks to, with its text side. `name` is what responses report."""

    view: ModelView
    text: ModelText

    @property
    def info(self) -> ModelInfo:
        return self.view.info

    @property
    def name(self) -> str:
        return self.view.info.names[0]


class GenerationService:
    """Shared by all dialects of one app; holds no per-request state."""

    def __init__(
        self, *, settings: RouterSettings, gateway: Gateway, texts: TextLibrary, metrics: RouterMetrics, version: str
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._gateway = gateway
        self._texts = texts
        self._version = version

    def view(self) -> ModelView:
        """Return the served model. Raises ServiceUnavailableError before the first engine is usable."""
        view = self._gateway.model()
        if view is None:
            raise ServiceUnavailableError("No engine is ready yet.", retry_after_s=1.0)
        return view

    async def model(self, name: str | None, *, task: str | None = GENERATE_TASK) -> ServedModel:
        """Return the model named in a request; null and empty mean the served one.

        Raises NotFoundError for another name, NotImplementedByModelError when the model lacks `task`, and
        ServiceUnavailableError.
        """
        view = self.view()
        names = view.info.names
        if name and name not in names and not self.settings.skip_model_name_validation:
            valid = ", ".join(names)
            raise NotFoundError(f"The model `{name[:200]}` does not exist. Valid names: {valid}.", param="model")
        if task is not None and task not in view.info.tasks:
            raise NotImplementedByModelError(f"The model does not support the task {task!r}.", param="model")
        return ServedModel(view, await self._texts.get(view))

    def check(self, fields: GenerationFields) -> None:
        """Check what needs no model. Raises BadRequestError, or NotImplementedByModelError for absent features."""
        refuse_unsupported(fields)
        check_shared_fields(fields, max_stop_strings=self.settings.max_stop_strings)

    async def plan(
        self,
        fields: GenerationFields,
        model: ServedModel,
        *,
        logprobs: LogprobRequest,
        requested_tokens: int | None,
        tokens_param: str,
    ) -> SamplingPlan:
        """Check the sampling fields. Raises BadRequestError naming the field."""
        banned: list[list[int]] | None = None
        if fields.bad_words:
            banned = await model.text.in_thread(lambda: bad_words(fields.bad_words, model.text, self.settings))
        return plan_sampling(
            fields,
            info=model.info,
            text=model.text,
            defaults=sampling_defaults(model.view.assets.generation_config, self.settings),
            logprobs=logprobs,
            requested_tokens=requested_tokens,
            tokens_param=tokens_param,
            max_n=self.settings.max_n,
            bad_word_ids=banned,
        )

    async def start(
        self,
        fields: GenerationFields,
        model: ServedModel,
        context: CallContext,
        *,
        response_id: str,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
    ) -> Batch:
        """Submit every prompt and return once engines accepted all of them; the caller closes the batch.

        Raises BadRequestError (no room for output) and whatever the gateway raises.
        """
        samplings = [plan.for_prompt(len(prompt.ids), model.info.max_model_len) for prompt in prompts]
        starts = [
            partial(self._start_one, fields, model, context, f"{response_id}-{number}", prompt, sampling, plan.n)
            for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        return await start_all(starts)

    async def _start_one(
        self,
        fields: GenerationFields,
        model: ServedModel,
        context: CallContext,
        name: str,
        prompt: Prompt,
        sampling: Sampling,
        n: int,
    ) -> Running:
        generation = await self._gateway.submit(
            EngineRequest(
                # Clients may use an id twice; what engines see must be unique.
                rid=f"{name}-{secrets.token_hex(4)}",
                prompt_ids=prompt.ids,
                sampling=sampling,
                seeds=draw_seeds(fields.seed, n),
                cache_salt=fields.cache_salt or "",
                priority=context.priority_of(fields),
                timeout_s=self.settings.request_timeout or None,
                session_id=context.session_of(fields),
                traceparent=context.traceparent,
                assets_digest=model.info.assets_digest,
            )
        )
        options = TextOptions(
            stops=tuple(stop_strings(fields)),
            include_stop=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            min_tokens=fields.min_tokens,
        )
        tokenizer = model.text.tokenizer
        readers = [
            SequenceReader(
                index,
                tokenizer.detokenizer(prompt.ids, skip_special_tokens=fields.skip_special_tokens),
                options,
            )
            for index in range(n)
        ]
        return Running(
            generation,
            readers,
            num_prompt_tokens=len(prompt.ids),
            wants_prompt_logprobs=sampling.prompt_logprobs is not None,
            metrics=self.metrics.request(
                model=model.name,
                engine=generation.decode_engine,
                received_s=context.received_s,
                num_prompt_tokens=len(prompt.ids),
                n=n,
                max_tokens=sampling.max_tokens,
            ),
        )

    def printer(self, fields: GenerationFields, model: ServedModel, depth: int | None) -> LogprobPrinter:
        """Return the printer of a request's log-probs."""
        as_ids = fields.return_tokens_as_token_ids
        return LogprobPrinter(
            model.text.tokenizer,
            depth=depth or 0,
            as_ids=self.settings.return_tokens_as_token_ids if as_ids is None else as_ids,
            only_requested_ids=fields.logprob_token_ids is not None,
        )

    def fingerprint(self, model: ServedModel) -> str | None:
        """Return `system_fingerprint`: equal values mean equal outputs for equal seeds."""
        short = model.info.output_hash[:8]
        match self.settings.fingerprint_mode:
            case FingerprintMode.FULL:
                return f"kvferry-{self._version}-{short}"
            case FingerprintMode.HASH:
                return short
            case FingerprintMode.CUSTOM:
                return self.settings.fingerprint_value
            case FingerprintMode.NONE:
                return None

    def stream_interval(self, fields: GenerationFields) -> int:
        """Return the fewest tokens of a chunk: the server's, or more when the request says so."""
        return max(self.settings.stream_interval, fields.stream_interval or 1)
