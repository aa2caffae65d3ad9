"""bf16 of every architecture with tiny random weights, by the rule of `kit.bfloat16`."""

from __future__ import annotations

import random

import pytest
import torch

from kit.bfloat16 import compare
from kit.checkpoints import VOCAB_SIZE, make_checkpoint, reference_model
from kit.models import load_model, make_runner


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_bf16_logits_stay_within_the_tolerance(arch: str) -> None:
    path = make_checkpoint(arch, dtype="bfloat16")
    model = load_model(path, dtype=torch.bfloat16)
    rng = random.Random(5)

    comparison = compare(
        lambda sampler: make_runner(model, sampler=sampler),
        reference=reference_model(path, "bfloat16"),
        exact=reference_model(path, "float32"),
        prompt=[rng.randrange(VOCAB_SIZE) for _ in range(21)],
        num_tokens=32,
    )

    comparison.check(arch)
