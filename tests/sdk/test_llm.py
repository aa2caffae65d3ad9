"""`LLM` on a tiny checkpoint: what a script gives, what it gets back, and what it is told when it asks for nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from kit.checkpoints import make_checkpoint
from kvferry import LLM, RequestOutput, SamplingParams
from kvferry_engine.assembly import EngineParts
from kvferry_engine.config import DType
from kvferry_engine.errors import ConfigError, WeightsNotFoundError

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 32, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "The ferry carries keys"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(make_checkpoint("llama")), dtype=DType.FLOAT32, **SETTINGS) as made:
        yield made


def _run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def _ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


# --- prompts ------------------------------------------------------------------------------------------------------------


def test_one_text_gives_one_finished_output(llm: LLM) -> None:
    (output,) = _run(llm, PROMPT)

    assert output.finished
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == llm.get_tokenizer().encode(PROMPT, add_special_tokens=True)
    (one,) = output.outputs
    assert (one.index, len(one.token_ids), one.finish_reason, one.stop_reason) == (0, 8, "length", None)
    assert one.text == llm.get_tokenizer().decode(one.token_ids, skip_special_tokens=True)
    assert one.logprobs is None
    assert one.cumulative_logprob is None


def test_text_ids_and_both_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT, add_special_tokens=True)

    outputs = _run(llm, [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}])

    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert [output.prompt for output in outputs] == [PROMPT, None, PROMPT, None]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_a_list_of_numbers_is_one_prompt_and_a_mapping_alone_is_one(llm: LLM) -> None:
    assert len(_run(llm, [5, 6, 7])) == 1
    assert len(_run(llm, {"prompt_token_ids": [5, 6, 7]})) == 1


def test_outputs_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(12)]
    alone = [_run(llm, prompt)[0].outputs[0].token_ids for prompt in prompts]
    lengths = [SamplingParams(temperature=0.0, max_tokens=8 - i % 4, ignore_eos=True) for i in range(12)]

    outputs = _run(llm, prompts, lengths)

    assert [output.prompt_token_ids for output in outputs] == prompts
    assert _ids(outputs) == [[ids[: 8 - i % 4]] for i, ids in enumerate(alone)]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert _run(llm, []) == []


def test_the_progress_bar_stands_on_standard_error_unless_it_is_off(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(llm, PROMPT)
    silent = capsys.readouterr()
    llm.generate([PROMPT, PROMPT], GREEDY)
    shown = capsys.readouterr()

    assert silent.err == ""
    assert "Processed prompts" in shown.err
    assert "2/2" in shown.err


# --- sampling -----------------------------------------------------------------------------------------------------------


def test_a_seed_makes_several_outputs_repeatable_and_different(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)

    first, second = _ids(_run(llm, PROMPT, params)), _ids(_run(llm, PROMPT, params))

    assert first == second
    assert first[0][0] != first[0][1]


def test_the_ith_output_has_the_seed_plus_i(llm: LLM) -> None:
    both = _ids(_run(llm, PROMPT, SamplingParams(n=2, seed=7, max_tokens=12, ignore_eos=True)))
    one = _ids(_run(llm, PROMPT, SamplingParams(seed=8, max_tokens=12, ignore_eos=True)))

    assert both[0][1] == one[0][0]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_is_reported(llm: LLM, include: bool) -> None:
    whole = _run(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0].outputs[0].text
    stop = whole[10:13]
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, stop=["never", stop], include_stop_str_in_output=include
    )

    (one,) = _run(llm, PROMPT, params)[0].outputs

    assert (one.finish_reason, one.stop_reason) == ("stop", stop)
    assert one.text == whole[: whole.index(stop)] + (stop if include else "")
    assert len(one.token_ids) < 40


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(llm: LLM) -> None:
    whole = _run(llm, PROMPT)[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=whole[-3:] + "and more")

    (one,) = _run(llm, PROMPT, params)[0].outputs

    assert (one.text, one.finish_reason) == (whole, "length")


def test_a_stop_token_ends_the_output_and_is_not_in_its_text(llm: LLM) -> None:
    whole = _run(llm, PROMPT)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[whole[2]])

    (one,) = _run(llm, PROMPT, params)[0].outputs

    end = whole.index(whole[2]) + 1
    assert (one.finish_reason, one.stop_reason) == ("stop", whole[2])
    assert one.token_ids == whole[:end]
    assert one.text == llm.get_tokenizer().decode(whole[: end - 1], skip_special_tokens=True)


def test_output_logprobs_have_one_entry_a_token_with_the_chosen_one_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)

    (one,) = _run(llm, PROMPT, params)[0].outputs

    assert one.logprobs is not None
    assert [len(entry) for entry in one.logprobs] == [3] * 8
    chosen = [entry[token] for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
    assert all(logprob.rank == 1 for logprob in chosen)
    assert one.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))
    assert all(isinstance(item.decoded_token, str) for entry in one.logprobs for item in entry.values())


def test_prompt_logprobs_have_one_entry_a_prompt_token_and_none_for_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)

    (output,) = _run(llm, PROMPT, params)

    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first, *rest = output.prompt_logprobs
    assert first is None
    for entry, token in zip(rest, output.prompt_token_ids[1:], strict=True):
        assert entry is not None
        assert token in entry
        assert 2 <= len(entry) <= 3
        assert entry[token].logprob <= 0.0


# --- chat ---------------------------------------------------------------------------------------------------------------


def test_chat_is_the_template_and_then_generate(llm: LLM) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)

    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)

    assert answer.prompt_token_ids == ids
    assert answer.outputs == _run(llm, ids)[0].outputs


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": word}] for word in ("Hello", "Numbers")]

    together = llm.chat(conversations, GREEDY, use_tqdm=False)

    alone = [llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in conversations]
    assert _ids(together) == _ids(alone)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("min_tokens", 17),
        ("seed", "x"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", ["a"]),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("logit_bias", {"a": 1.0}),
        ("allowed_token_ids", 3),
        ("bad_words", [" "]),
    ],
)
def test_a_wrong_sampling_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .*it must be"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # wrong on purpose


def test_several_greedy_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^n is 2 with temperature"):
        SamplingParams(n=2, temperature=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop_token_ids", [320]),
        ("logit_bias", {320: 1.0}),
        ("allowed_token_ids", []),
    ],
)
def test_what_only_the_engine_can_judge_is_refused_by_name(llm: LLM, field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]  # right type, wrong for this model

    with pytest.raises(ValueError, match=field):
        _run(llm, PROMPT, params)


@pytest.mark.parametrize(
    "prompt",
    [5, None, b"bytes", {}, {"prompt": 5}, {"prompt_token_ids": "ab"}, [1, "a"], [[1, 2], 3], [None], [[1, "a"]]],
)
def test_what_is_no_prompt_is_refused_and_says_what_a_prompt_is(llm: LLM, prompt: object) -> None:
    with pytest.raises(ValueError, match="a prompt is text, a list of token ids, or a mapping"):
        _run(llm, prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ([[]], "empty"),
        ([-1], "vocabulary"),
        ([320], "vocabulary"),
        ([5] * 256, "256 tokens"),
        ([2**40], "a prompt is"),
    ],
)
def test_a_prompt_the_model_cannot_take_is_refused(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _run(llm, prompt)


def test_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    (output,) = _run(llm, [5] * 255)

    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_one_wrong_prompt_of_many_runs_none_and_leaves_nothing_behind(llm: LLM) -> None:
    before = _run(llm, PROMPT)

    with pytest.raises(ValueError, match="256"):
        _run(llm, [PROMPT, [5] * 300])

    assert _ids(_run(llm, PROMPT)) == _ids(before)
    assert _parts(llm).core.requests() == []
    assert _parts(llm).core.scheduler.pool.num_free == 32


def test_the_number_of_params_must_be_that_of_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        _run(llm, [PROMPT] * 3, [GREEDY] * 2)


# --- settings and the end -----------------------------------------------------------------------------------------------


def test_settings_may_be_text_and_wrong_ones_are_told() -> None:
    path = str(make_checkpoint("llama"))

    with pytest.raises(ValueError, match="dtype is 'float99', allowed are auto, bfloat16, float16, float32"):
        LLM(path, dtype="float99", **SETTINGS)
    with pytest.raises(ValueError, match="there is no setting max_modellen; did you mean max_model_len"):
        LLM(path, max_modellen=5)
    with LLM(path, dtype="float32", device="cpu", served_model_name="tiny", **SETTINGS) as llm:
        assert _parts(llm).model_info.dtype == "float32"
        assert _parts(llm).model_info.names == ["tiny"]


def test_a_setting_out_of_range_is_the_engines_error() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 0: allowed is at least 1"):
        LLM("/nowhere/model", max_num_seqs=0)


def test_a_model_that_is_not_there_is_the_engines_error() -> None:
    with pytest.raises(WeightsNotFoundError, match="there is no /nowhere/model"):
        LLM("/nowhere/model")


def test_a_batch_may_be_longer_than_a_servers_queue(llm: LLM) -> None:
    assert _parts(llm).core.limits.max_queued > 1_000_000


def test_a_closed_llm_says_so_and_may_be_closed_again() -> None:
    llm = LLM(str(make_checkpoint("llama")), dtype="float32", **SETTINGS)

    llm.close()
    llm.close()

    with pytest.raises(RuntimeError, match="closed"):
        _run(llm, PROMPT)


def test_an_interrupt_ends_the_batch_and_the_next_one_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _run(llm, PROMPT)
    core = _parts(llm).core
    turn, turns = core.turn, iter(range(100))

    def interrupted() -> bool:
        if next(turns) == 3:
            raise KeyboardInterrupt
        return turn()

    with monkeypatch.context() as patch:
        patch.setattr(core, "turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _run(llm, [PROMPT] * 3)

    assert _ids(_run(llm, PROMPT)) == _ids(before)
    assert core.requests() == []
    assert core.scheduler.pool.num_free == 32


def _parts(llm: LLM) -> EngineParts:
    return llm._parts
