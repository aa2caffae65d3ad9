"""What only the engine can check is refused with the name of the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry_engine.errors import RequestError
from kvferry_engine.sampling.validation import check_prompt, check_sampling, check_submit
from kvferry_engine.wire.messages import Sampling, Submit, SubmitSequence
from kvferry_engine.wire.packing import pack_ids

VOCAB = 100


def check(max_logprobs: int = 20, **values: Any) -> None:
    check_sampling(Sampling(**{"max_tokens": 10, **values}), vocab_size=VOCAB, max_logprobs=max_logprobs)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"min_tokens": 10, "eos_token_ids": [0], "stop_token_ids": [99]},
        {"logit_bias": {0: -100.0, 99: float("inf")}},
        {"allowed_token_ids": [5], "eos_token_ids": [5]},
        {"allowed_token_ids": [5, 6], "eos_token_ids": [5], "min_tokens": 1},
        {"bad_words": [[1, 2, 3]] * 256},
        {"logprobs": 20, "prompt_logprobs": 0, "logprob_token_ids": [1] * 128},
        {"temperature": 2.0, "top_p": 0.001, "top_k": 1000, "min_p": 1.0},
    ],
)
def test_sensible_requests_pass(values: dict[str, Any]) -> None:
    check(**values)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("stop_token_ids", [1, 100]),
        ("eos_token_ids", [-1]),
        ("allowed_token_ids", [100]),
        ("allowed_token_ids", []),
        ("logprob_token_ids", [100]),
        ("logprob_token_ids", [1] * 129),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("bad_words", [[1], [1, 100]]),
        ("bad_words", [[]]),
        ("bad_words", [[1]] * 257),
        ("bad_words", [[1] * 513] * 2),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", -2),
        ("prompt_logprobs", 21),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", 11),
    ],
)
def test_wrong_values_name_their_parameter(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check(**{param: value})

    assert caught.value.param == param


def test_an_allow_list_that_min_tokens_empties_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens forbids"):
        check(allowed_token_ids=[5, 6], eos_token_ids=[5], stop_token_ids=[6], min_tokens=1)


def test_the_whole_vocabulary_needs_the_limit_lifted() -> None:
    check(max_logprobs=-1, logprobs=-1, prompt_logprobs=-1)
    check(max_logprobs=VOCAB, logprobs=-1)
    with pytest.raises(RequestError, match="asks for 100 log-probs, this engine allows 99"):
        check(max_logprobs=99, logprobs=-1)


def test_prompts_must_fit_and_leave_room() -> None:
    check_prompt(np.arange(9, dtype=np.int32), vocab_size=VOCAB, max_model_len=10)
    for prompt, message in (
        ([], "is empty"),
        (range(10), "shorten the prompt"),
        ([1, 100], "has the id 100"),
        ([1, -5], "has the id -5"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            check_prompt(np.array(prompt, dtype=np.int32), vocab_size=VOCAB, max_model_len=10)
        assert caught.value.param == "prompt"


def test_a_whole_submission_is_checked() -> None:
    def submit(prompt: list[int], emitted: list[int], **values: Any) -> None:
        message = Submit(
            rid="r",
            attempt=0,
            engine_boot="b",
            prompt_ids=pack_ids(prompt),
            sequences=[SubmitSequence(index=0, seed=1, emitted_ids=pack_ids(emitted))],
            sampling=Sampling(**{"max_tokens": 10, **values}),
        )
        check_submit(message, vocab_size=VOCAB, max_model_len=50, max_logprobs=20)

    submit([1, 2], [3])
    for arguments, param in (
        (([200], []), "prompt"),
        (([1], [200]), "emitted_ids"),
        (([1], [], {"logprobs": 30}), "logprobs"),
    ):
        with pytest.raises(RequestError) as caught:
            submit(*arguments[:2], **(arguments[2] if len(arguments) > 2 else {}))
        assert caught.value.param == param
