"""Configs of both styles give what transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError
from kvferry_engine.loader.hf_config import ARCHITECTURES, model_config
from kvferry_engine.models import registry

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def raw(architecture: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **values}


@pytest.mark.parametrize(
    "config",
    [
        raw("LlamaForCausalLM", rope_theta=500000.0),
        raw("LlamaForCausalLM", num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5),
        raw("LlamaForCausalLM", rope_scaling={"rope_type": "llama3", **LLAMA3_ROPE}, rope_theta=500000.0),
        raw("LlamaForCausalLM", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}),
        raw("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0}),
        raw("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
        raw("MistralForCausalLM", max_position_embeddings=512),
        raw("MistralForCausalLM", sliding_window=None, num_key_value_heads=4, head_dim=None),
        raw("Qwen2ForCausalLM", num_key_value_heads=2),
        raw("Qwen2ForCausalLM", num_key_value_heads=2, use_sliding_window=True, sliding_window=32, max_window_layers=1),
        raw("Qwen2ForCausalLM", num_key_value_heads=8, rope_scaling={"type": "yarn", "factor": 4.0}, rope_theta=1e6),
        raw("Qwen3ForCausalLM", num_key_value_heads=4),
        raw("Qwen3ForCausalLM", num_key_value_heads=4, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    ],
)
def test_a_config_means_what_transformers_makes_of_it(config: dict[str, Any]) -> None:
    oracle_class = getattr(transformers, config["architectures"][0].replace("ForCausalLM", "Config"))
    oracle = oracle_class(**{key: value for key, value in config.items() if key != "architectures"})

    ours = model_config(config)

    assert ours.num_kv_heads == oracle.num_key_value_heads
    assert ours.head_dim == getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads
    assert ours.max_position == oracle.max_position_embeddings
    assert ours.rms_norm_eps == oracle.rms_norm_eps
    assert ours.tie_word_embeddings == oracle.tie_word_embeddings
    assert (ours.sliding_window or None) == getattr(oracle, "sliding_window", None)
    assert list(ours.layer_types) == (getattr(oracle, "layer_types", None) or [])
    assert ours.hidden_activation == oracle.hidden_act
    expected = {key: value for key, value in oracle.rope_parameters.items() if key != "type"}
    if expected["rope_type"] in ("llama3", "yarn"):
        expected.pop("original_max_position_embeddings")
        assert (
            ours.rope.get("original_max_position_embeddings", ours.max_position)
            == (oracle.rope_parameters["original_max_position_embeddings"])
        )
    assert {key: value for key, value in ours.rope.items() if key in expected} == expected
    assert set(ours.rope) - set(expected) <= {"original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (raw("LlamaForCausalLM"), (False, False, False, False)),
        (raw("LlamaForCausalLM", attention_bias=True, mlp_bias=True), (True, True, True, False)),
        (raw("MistralForCausalLM", attention_bias=True), (False, False, False, False)),
        (raw("Qwen2ForCausalLM", num_key_value_heads=8), (True, False, False, False)),
        (raw("Qwen3ForCausalLM", num_key_value_heads=8, attention_bias=True), (True, True, False, True)),
    ],
)
def test_biases_and_norms_follow_the_architecture(config: dict[str, Any], biases: tuple[bool, ...]) -> None:
    ours = model_config(config)

    assert (ours.attention_bias, ours.output_bias, ours.mlp_bias, ours.qk_norm) == biases


def test_the_dtype_is_read_under_both_names_and_falls_back_to_the_checkpoint() -> None:
    assert model_config(raw("LlamaForCausalLM", dtype="bfloat16")).dtype == "bfloat16"
    assert model_config(raw("LlamaForCausalLM", torch_dtype="torch.float16")).dtype == "float16"
    assert model_config(raw("LlamaForCausalLM"), checkpoint_dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(UnsupportedModelError, match="float8_e4m3fn"):
        model_config(raw("LlamaForCausalLM", dtype="float8_e4m3fn"))


def test_eos_ids_come_from_both_configs_in_order() -> None:
    config = raw("LlamaForCausalLM", eos_token_id=[7, 8], bos_token_id=1)

    assert model_config(config, {"eos_token_id": [8, 9]}).eos_token_ids == (7, 8, 9)
    assert model_config(raw("LlamaForCausalLM", eos_token_id=5), {"eos_token_id": 5}).eos_token_ids == (5,)
    assert model_config(raw("LlamaForCausalLM", eos_token_id=None)).eos_token_ids == ()


def test_an_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"BertModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2"):
        model_config(raw("BertModel"))


def test_quantised_checkpoints_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="awq"):
        model_config(raw("LlamaForCausalLM", quantization_config={"quant_method": "awq"}))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_and_senseless_sizes_are_named(key: str) -> None:
    config = raw("LlamaForCausalLM")
    with pytest.raises(WeightsInvalidError, match=key):
        model_config({**config, key: -1})
    with pytest.raises(WeightsInvalidError, match=key):
        model_config({name: value for name, value in config.items() if name != key})


def test_the_list_of_architectures_is_the_models_own() -> None:
    assert set(ARCHITECTURES) == set(registry.ARCHITECTURES)
