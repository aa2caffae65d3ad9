"""The checks of a request that need the engine: vocabulary, log-prob limit, length.

A router checks shapes and ranges before; what arrives here is checked once more where a wrong value would harm the other
requests of a batch, since the SDK and older routers send requests, too. Reference: http-generation 14.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kvferry_engine.errors import RequestError
from kvferry_engine.request import Int32
from kvferry_engine.wire.messages import Sampling, Submit

MAX_BAD_WORDS = 256
"""Twice the router's 128 words: each comes with and without a space in front."""
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_IDS = 128


def check_submit(message: Submit, *, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
    """Raises RequestError, naming the parameter, for a request that this engine can never run.

    `max_logprobs` -1 = no limit.
    """
    prompt = np.frombuffer(message.prompt_ids, dtype="<i4")
    check_prompt(prompt, vocab_size=vocab_size, max_model_len=max_model_len)
    for part in message.sequences:
        _check_range(np.frombuffer(part.emitted_ids, dtype="<i4"), vocab_size, "emitted_ids")
    check_sampling(message.sampling, vocab_size=vocab_size, max_logprobs=max_logprobs)


def check_prompt(prompt: Int32, *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError for an empty prompt, one that leaves no room for output, and ids outside the vocabulary."""
    if not len(prompt):
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, this engine takes {max_model_len} of prompt and output together; "
            "shorten the prompt",
            param="prompt",
        )
    _check_range(prompt, vocab_size, "prompt")


def check_sampling(sampling: Sampling, *, vocab_size: int, max_logprobs: int) -> None:
    """Raises RequestError, naming the parameter, for values outside their range, vocabulary or limit."""
    _check_numbers(sampling)
    for param in ("eos_token_ids", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        _check_ids(getattr(sampling, param) or (), vocab_size, param)
    _check_ids(sampling.logit_bias or (), vocab_size, "logit_bias")
    if any(math.isnan(value) for value in (sampling.logit_bias or {}).values()):
        raise RequestError("values of logit_bias must be numbers", param="logit_bias")
    _check_allowed(sampling)
    _check_bad_words(sampling.bad_words or [], vocab_size)
    for param in ("logprobs", "prompt_logprobs"):
        _check_depth(getattr(sampling, param), param, vocab_size, max_logprobs)
    if len(sampling.logprob_token_ids or ()) > MAX_LOGPROB_IDS:
        raise RequestError(
            f"logprob_token_ids has {len(sampling.logprob_token_ids or ())} ids, at most {MAX_LOGPROB_IDS} are allowed",
            param="logprob_token_ids",
        )


def _check_numbers(sampling: Sampling) -> None:
    ranges = {
        "temperature": 0.0 <= sampling.temperature < math.inf,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "top_k": 0 <= sampling.top_k < 1 << 31,
        "min_p": 0.0 <= sampling.min_p <= 1.0,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "repetition_penalty": 0.0 < sampling.repetition_penalty < math.inf,
        "max_tokens": sampling.max_tokens >= 1,
        "min_tokens": 0 <= sampling.min_tokens <= sampling.max_tokens,
    }
    for param, is_fine in ranges.items():
        if not is_fine:
            raise RequestError(f"{param} is out of range: {getattr(sampling, param)}", param=param)


def _check_allowed(sampling: Sampling) -> None:
    allowed = sampling.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise RequestError(
            "allowed_token_ids is empty; leave it out or name at least one id", param="allowed_token_ids"
        )
    if sampling.min_tokens and not {*allowed} - {*sampling.eos_token_ids, *sampling.stop_token_ids}:
        raise RequestError(
            "allowed_token_ids has only ids that end the output, and min_tokens forbids those; allow another id",
            param="allowed_token_ids",
        )


def _check_bad_words(words: list[list[int]], vocab_size: int) -> None:
    num_tokens = sum(map(len, words))
    if len(words) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words has {len(words)} token sequences with {num_tokens} tokens; "
            f"at most {MAX_BAD_WORDS} with {MAX_BAD_WORD_TOKENS} are allowed",
            param="bad_words",
        )
    for word in words:
        if not word:
            raise RequestError("bad_words has an empty token sequence", param="bad_words")
        _check_ids(word, vocab_size, "bad_words")


def _check_depth(depth: int | None, param: str, vocab_size: int, max_logprobs: int) -> None:
    if depth is None:
        return
    if depth < -1:
        raise RequestError(f"{param} must be -1 (all) or at least 0, it is {depth}", param=param)
    asked = vocab_size if depth == -1 else depth
    if max_logprobs != -1 and asked > max_logprobs:
        raise RequestError(f"{param} asks for {asked} log-probs, this engine allows {max_logprobs}", param=param)


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{param} has the id {wrong}, the vocabulary has ids 0 to {vocab_size - 1}", param=param)


def _check_range(ids: Int32, vocab_size: int, param: str) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise RequestError(f"{param} has the id {wrong}, the vocabulary has ids 0 to {vocab_size - 1}", param=param)
