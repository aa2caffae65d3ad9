"""SamplingParams of the Python SDK, with vLLM's names, and its translation to what an engine understands."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry_engine.wire.assets import AssetBundle
from kvferry_engine.wire.messages import Sampling

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01

_WHOLE = ("n", "top_k", "min_tokens")
_OPTIONAL_WHOLE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_IDS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _is_none_or_list_of(kind: type, value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value))


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_whole(key) and _is_number(bias) for key, bias in value.items())


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample; ranges are checked at construction. Raises ValueError naming the field, the value and what is allowed."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    def __post_init__(self) -> None:
        """Check every type and range."""
        self._check_types()
        checks = (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for off"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "above 0 and finite"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "between 0 and max_tokens"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 for all"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= -1,
                "at least 0, or -1 for all",
            ),
            ("stop", all(self.stops), "non-empty strings"),
            ("bad_words", all(word.strip() for word in self.bad_words or ()), "non-empty strings"),
        )
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be {allowed}")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n is {self.n} with temperature {self.temperature}: greedy sampling gives one answer, set n=1"
            )

    def _check_types(self) -> None:
        for names, is_right, allowed in (
            (_WHOLE, _is_whole, "a whole number"),
            (_OPTIONAL_WHOLE, _or_none(_is_whole), "a whole number or None"),
            (_NUMBERS, _is_number, "a number"),
            (
                ("stop",),
                lambda value: isinstance(value, str) or _is_none_or_list_of(str, value),
                "a string or a list of strings",
            ),
            (("bad_words",), lambda value: _is_none_or_list_of(str, value), "a list of strings"),
            (_IDS, lambda value: _is_none_or_list_of(int, value), "a list of token ids"),
            (("logit_bias",), _or_none(_is_bias), "a mapping of token ids to numbers"),
        ):
            for name in names:
                value = getattr(self, name)
                if not is_right(value):
                    raise ValueError(f"{name} is {value!r}, it must be {allowed}")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def seeds(self) -> list[int]:
        """A 64-bit seed for each of the n sequences: seed + i, or drawn."""
        if self.seed is None or self.seed == -1:
            return [secrets.randbits(63) for _ in range(self.n)]
        return [(self.seed + i + 2**63) % 2**64 - 2**63 for i in range(self.n)]

    def to_wire(self, *, room: int, assets: AssetBundle, encode: Callable[[str], list[int]]) -> Sampling:
        """Return the engine's form; `room` is how many tokens the context leaves after the prompt (at least 1).

        `encode` turns banned words into ids (no special tokens).
        """
        is_greedy = self.temperature < GREEDY_BELOW
        eos = [] if self.ignore_eos or assets.eos_token_id is None else [assets.eos_token_id]
        extra = [] if self.ignore_eos else assets.extra_eos_token_ids
        banned = [encode(prefix + word.lstrip()) for word in self.bad_words or () for prefix in ("", " ")]
        return Sampling(
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            min_tokens=min(self.min_tokens, room),
            temperature=0.0 if is_greedy else max(self.temperature, LOWEST_TEMPERATURE),
            top_p=1.0 if is_greedy else self.top_p,
            top_k=0 if is_greedy or self.top_k == -1 else self.top_k,
            min_p=0.0 if is_greedy else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            eos_token_ids=eos,
            stop_token_ids=list(dict.fromkeys([*(self.stop_token_ids or []), *extra])),
            logit_bias={i: max(-100.0, min(100.0, bias)) for i, bias in self.logit_bias.items()}
            if self.logit_bias
            else None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=banned or None,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
        )
