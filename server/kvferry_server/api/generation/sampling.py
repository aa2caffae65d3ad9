"""Request fields and the model's generation config to the `Sampling` an engine understands, with every range check.

Order: request value, then server default, then neutral value. Checks that vLLM leaves to its engine (ids outside the
vocabulary, log-prob limits, banned words) happen here too, so a stream is refused with a status and not in the stream.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry_engine.wire.messages import ModelInfo, RepetitionDetection, Sampling
from kvferry_server.api.checks import invalid
from kvferry_server.errors import BadRequestError
from kvferry_server.settings import GenerationConfig, RouterSettings
from kvferry_server.text.model_text import ModelText

from .protocol import GenerationFields, RepetitionDetectionOptions

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
LOGIT_BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for fields a request leaves out; `hard_cap` limits output whatever a request asks."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int | None = None
    hard_cap: int | None = None


def sampling_defaults(generation_config: dict[str, Any], settings: RouterSettings) -> SamplingDefaults:
    """Return the defaults of a model under the settings: its generation_config.json, then the override on top."""
    values = generation_config if settings.generation_config is GenerationConfig.AUTO else {}
    values = {**values, **settings.override_generation_config}
    names = [name for name in SamplingDefaults.__dataclass_fields__ if name != "hard_cap"]
    given = {name: values[name] for name in names if values.get(name) is not None}
    return SamplingDefaults(**given, hard_cap=settings.override_generation_config.get("max_new_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """Depths a dialect wants: alternatives per output token and per prompt token; None = no log-probs."""

    output: int | None = None
    output_param: str = "logprobs"
    prompt: int | None = None
    prompt_param: str = "prompt_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Checked sampling of a request, still without the limits that depend on the prompt's length."""

    sampling: Sampling
    """Its max_tokens is a placeholder until `for_prompt`."""
    n: int
    requested_tokens: int | None
    """Output the client asked for; None: as much as fits."""
    tokens_param: str
    defaults: SamplingDefaults

    def for_prompt(self, num_prompt_tokens: int, max_model_len: int) -> Sampling:
        """Return the sampling for a prompt of this length. Raises BadRequestError when nothing could be generated."""
        wanted = self.requested_tokens if self.requested_tokens is not None else self.defaults.max_new_tokens
        limits = (max_model_len - num_prompt_tokens, wanted, self.defaults.hard_cap)
        limit = min(value for value in limits if value is not None)
        if limit < 1:
            raise invalid(f"max_tokens must be at least 1, got {limit}.", param="max_tokens", value=limit)
        if self.sampling.min_tokens > limit:
            raise BadRequestError(
                f"min_tokens must be at most max_tokens={limit}, got {self.sampling.min_tokens}.", param="min_tokens"
            )
        return msgspec.structs.replace(self.sampling, max_tokens=limit)


def plan_sampling(
    fields: GenerationFields,
    *,
    info: ModelInfo,
    text: ModelText,
    defaults: SamplingDefaults,
    logprobs: LogprobRequest,
    requested_tokens: int | None,
    tokens_param: str,
    max_n: int,
    bad_word_ids: list[list[int]] | None,
) -> SamplingPlan:
    """Check every sampling field against its range and the model, and return the plan.

    Raises BadRequestError naming the field. `bad_word_ids` are the banned sequences, tokenized by `bad_words`.
    """
    if requested_tokens is not None and requested_tokens > info.max_model_len:
        raise invalid(
            f"`{tokens_param}` is larger than the maximum context length of {info.max_model_len} tokens.",
            param=tokens_param,
            value=requested_tokens,
        )
    if requested_tokens is not None and requested_tokens < 1:
        raise invalid(
            f"{tokens_param} must be at least 1, got {requested_tokens}.", param=tokens_param, value=requested_tokens
        )
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= max_n:
        raise invalid(f"n must be between 1 and {max_n}, got {n}.", param="n", value=n)
    shape = _distribution(fields, defaults)
    if n > 1 and shape["temperature"] < GREEDY_BELOW:
        raise invalid("n must be 1 when sampling is greedy (temperature 0).", param="n", value=n)
    if fields.min_tokens < 0:
        raise invalid("min_tokens must be at least 0.", param="min_tokens", value=fields.min_tokens)
    _check_ids(fields.stop_token_ids, "stop_token_ids", info.vocab_size)
    _check_ids(fields.logprob_token_ids, "logprob_token_ids", info.vocab_size)
    if fields.logprob_token_ids is not None and logprobs.output is None:
        raise invalid("`logprob_token_ids` needs log-probs.", param="logprob_token_ids", value=fields.logprob_token_ids)
    if fields.allowed_token_ids is not None:
        if not fields.allowed_token_ids:
            raise invalid("`allowed_token_ids` may not be empty.", param="allowed_token_ids", value=[])
        _check_ids(fields.allowed_token_ids, "allowed_token_ids", info.vocab_size)
    sampling = Sampling(
        max_tokens=1,
        min_tokens=fields.min_tokens,
        **shape,
        eos_token_ids=_eos_ids(text, fields),
        stop_token_ids=_stop_ids(text, fields),
        logit_bias=_logit_bias(fields.logit_bias, info.vocab_size),
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=bad_word_ids,
        logprobs=_depth(logprobs.output, logprobs.output_param, info),
        prompt_logprobs=_depth(logprobs.prompt, logprobs.prompt_param, info),
        logprob_token_ids=fields.logprob_token_ids,
        repetition_detection=_repetition(fields.repetition_detection),
    )
    return SamplingPlan(
        sampling=sampling,
        n=n,
        requested_tokens=requested_tokens,
        tokens_param=tokens_param,
        defaults=defaults,
    )


def draw_seeds(seed: int | None, n: int) -> list[int]:
    """Return a signed 64-bit seed per sequence: seed + i when one is given (-1 counts as none), else drawn."""
    if seed is None or seed == -1:
        return [secrets.randbits(63) for _ in range(n)]
    return [(seed + i + 2**63) % 2**64 - 2**63 for i in range(n)]


def bad_words(words: Sequence[str], text: ModelText, settings: RouterSettings) -> list[list[int]] | None:
    """Return the token sequences of banned words, with and without a space in front. Run it in a worker thread.

    Raises BadRequestError above the limits.
    """
    if not words:
        return None
    found: list[list[int]] = []
    if len(words) <= settings.max_bad_words:
        for word in words:
            for prefix in ("", " "):
                ids = text.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
    num_tokens = sum(map(len, found))
    if len(words) > settings.max_bad_words or num_tokens > settings.max_bad_words_tokens:
        raise invalid(
            f"`bad_words` may be at most {settings.max_bad_words} words and {settings.max_bad_words_tokens} tokens.",
            param="bad_words",
            value=list(words),
        )
    return found


def _distribution(fields: GenerationFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the checked values that shape the distribution; greedy resets the ones without meaning."""

    def pick(name: str) -> Any:
        value = getattr(fields, name)
        return getattr(defaults, name) if value is None else value

    temperature = _in_range(pick("temperature"), "temperature", 0.0, 2.0)
    top_p = _in_range(pick("top_p"), "top_p", 0.0, 1.0, open_low=True)
    top_k = pick("top_k")
    if top_k < -1:
        raise invalid("top_k must be -1 (off), 0 (off) or at least 1.", param="top_k", value=top_k)
    min_p = _in_range(pick("min_p"), "min_p", 0.0, 1.0)
    penalties = {
        "presence_penalty": _in_range(pick("presence_penalty"), "presence_penalty", -2.0, 2.0),
        "frequency_penalty": _in_range(pick("frequency_penalty"), "frequency_penalty", -2.0, 2.0),
        "repetition_penalty": _in_range(pick("repetition_penalty"), "repetition_penalty", 0.0, math.inf, open_low=True),
    }
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        temperature = LOWEST_TEMPERATURE
    if temperature < GREEDY_BELOW:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **penalties}
    # Engines keep top_k in 32 bits; more than any vocabulary is the same as off.
    top_k = 0 if top_k == -1 or top_k >= 2**31 else top_k
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, **penalties}


def _in_range(value: float, name: str, low: float, high: float, *, open_low: bool = False) -> float:
    above = value > low if open_low else value >= low
    if not (math.isfinite(value) and above and value <= high):
        bracket = "(" if open_low else "["
        raise invalid(
            f"{name} must be finite and in {bracket}{low:g}, {high:g}], got {value}.", param=name, value=value
        )
    return float(value)


def _check_ids(ids: list[int] | None, param: str, vocab_size: int) -> None:
    wrong = [i for i in ids or [] if not 0 <= i < vocab_size]
    if wrong:
        raise invalid(f"`{param}` has ids outside the vocabulary of {vocab_size}.", param=param, value=wrong[0])


def _eos_ids(text: ModelText, fields: GenerationFields) -> list[int]:
    eos = text.bundle.eos_token_id
    return [] if fields.ignore_eos or eos is None else [eos]


def _stop_ids(text: ModelText, fields: GenerationFields) -> list[int]:
    extra = [] if fields.ignore_eos else text.bundle.extra_eos_token_ids
    return list(dict.fromkeys([*(fields.stop_token_ids or []), *extra]))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token_id = int(key)
        except ValueError as error:
            raise invalid("Keys of `logit_bias` must be token ids.", param="logit_bias", value=key) from error
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"`logit_bias` has an id outside the vocabulary of {vocab_size}.", param="logit_bias", value=key
            )
        if math.isnan(value):
            raise invalid("Values of `logit_bias` must be numbers.", param="logit_bias", value=value)
        parsed[token_id] = min(LOGIT_BIAS_LIMIT, max(-LOGIT_BIAS_LIMIT, value))
    return parsed


def _depth(depth: int | None, param: str, info: ModelInfo) -> int | None:
    """Return a log-prob depth within the engine's limit; -1 counts as the whole vocabulary."""
    if depth is None or depth == 0:
        return depth
    if depth < -1:
        raise invalid(f"`{param}` must be -1 or at least 0.", param=param, value=depth)
    asked = info.vocab_size if depth == -1 else depth
    if info.max_logprobs != -1 and asked > info.max_logprobs:
        raise invalid(
            f"`{param}` asks for {asked} log-probs, this server allows {info.max_logprobs}.", param=param, value=depth
        )
    return depth


def _repetition(options: RepetitionDetectionOptions | None) -> RepetitionDetection | None:
    if options is None or (options.max_pattern_size == 0 and options.min_count == 0):
        return None
    low, high = max(1, options.min_pattern_size), options.max_pattern_size
    if options.min_pattern_size < 0 or high < low or options.min_count < 2:
        raise invalid(
            "`repetition_detection` needs 0 <= min_pattern_size <= max_pattern_size and min_count >= 2.",
            param="repetition_detection",
            value=options.model_dump(),
        )
    return RepetitionDetection(max_pattern_size=high, min_pattern_size=low, min_count=options.min_count)
