"""fp32 greedy tokens equal transformers' for 64 tokens, through the paged path: odd prompt chunks, decodes, mixed batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kit.checkpoints import VOCAB_SIZE, make_checkpoint, reference_choices, reference_greedy, reference_model
from kit.models import load_model, make_runner
from kit.steps import Blocks, generate, make_sequence
from kvferry_kernels.dispatch import Backend

NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 5, 33, 70)

LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-three-heads": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-20": ("llama", {"head_dim": 20}),
    "llama-head-dim-80": ("llama", {"head_dim": 80, "num_hidden_layers": 2}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-longrope": ("llama", {"rope_parameters": {**LONGROPE, "rope_theta": 1e4}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-untied-bias": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def our_greedy(path: Path, backend: Backend) -> list[list[int]]:
    model = load_model(path, backend=backend)
    runner = make_runner(model)
    sequences = [make_sequence(index + 1, prompt, NUM_TOKENS) for index, prompt in enumerate(prompts())]
    return generate(runner, sequences, blocks=Blocks(64, 16))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    arch, overrides = MODELS[name]
    path = make_checkpoint(arch, **overrides)
    reference = reference_model(path)

    outputs = our_greedy(path, Backend.CPU)

    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output == reference_choices(reference, prompt, output)


def test_the_reference_kernels_give_the_same_tokens() -> None:
    path = make_checkpoint("mistral", sliding_window=24)

    assert our_greedy(path, Backend.REFERENCE) == our_greedy(path, Backend.CPU)


def test_the_tiny_models_are_not_degenerate() -> None:
    path = make_checkpoint("llama")

    ids = reference_greedy(reference_model(path), prompts()[2], 32)

    assert len(set(ids)) > 8
