"""The rotary table equals what transformers computes, for every rope type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvferry_engine.errors import UnsupportedModelError
from kvferry_engine.layers.rotary import RopeShape, cos_sin_table, inverse_frequencies

FACTORS = [1.0 + 0.25 * i for i in range(8)]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "short_factor": FACTORS,
        "long_factor": [2 * f for f in FACTORS],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"rope_type": "proportional", "factor": 1.5, "partial_rotary_factor": 0.5},
    "partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
}


def llama_config(rope: dict[str, Any], max_position: int = 512) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 5000.0, **rope},
    )


@pytest.mark.parametrize("length", [100, 512, 2000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    config = llama_config(dict(ROPES[name]))
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)

    shape = RopeShape(head_dim=16, max_position=512, max_model_len=length)
    ours, our_factor = inverse_frequencies(config.rope_parameters, shape)

    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-7)


def test_the_default_table_equals_transformers_cos_and_sin() -> None:
    config = llama_config({"rope_type": "default"})
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), torch.arange(300)[None])

    shape = RopeShape(head_dim=16, max_position=512, max_model_len=300)
    table = cos_sin_table(config.rope_parameters, shape, torch.device("cpu"))

    torch.testing.assert_close(table[:, :8], cos[0, :, :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], rtol=0, atol=1e-6)


def test_an_old_style_config_is_understood() -> None:
    shape = RopeShape(head_dim=16, max_position=512, max_model_len=100)
    old, _ = inverse_frequencies({"type": "linear", "factor": 2.0, "rope_theta": 1e4}, shape)
    new, _ = inverse_frequencies({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, shape)
    assert torch.equal(old, new)


def test_an_unknown_rope_type_is_named() -> None:
    shape = RopeShape(head_dim=16, max_position=512, max_model_len=100)
    with pytest.raises(UnsupportedModelError, match=r"'spiral'.*supported: default"):
        inverse_frequencies({"rope_type": "spiral"}, shape)


def test_a_missing_rope_parameter_is_named() -> None:
    shape = RopeShape(head_dim=16, max_position=512, max_model_len=100)
    with pytest.raises(UnsupportedModelError, match="factor"):
        inverse_frequencies({"rope_type": "linear"}, shape)
