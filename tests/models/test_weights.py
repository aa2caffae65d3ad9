"""Loading says clearly what is wrong with a checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kit.checkpoints import make_checkpoint
from kit.models import load_model, read_config
from kit.steps import weights_of
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import InvalidTensorParallelError, UnsupportedModelError, WeightsInvalidError
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.parallel import TensorParallel
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.registry import create_model
from kvferry_kernels.dispatch import Backend

Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def context(parallel: TensorParallel = TensorParallel()) -> LayerContext:  # noqa: B008
    return LayerContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=Backend.CPU,
        max_model_len=64,
        parallel=parallel,
    )


def checkpoint() -> tuple[ModelConfig, CausalLM, dict[str, Tensor]]:
    path = make_checkpoint("llama")
    config = read_config(path)
    return config, create_model(config, context()), dict(weights_of(path))


def test_a_missing_tensor_is_named() -> None:
    _, model, weights = checkpoint()
    del weights[Q_NAME]
    with pytest.raises(WeightsInvalidError, match=f"missing: {Q_NAME}$"):
        model.load_weights(weights.items())


def test_an_unexpected_tensor_is_named() -> None:
    _, model, weights = checkpoint()
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(WeightsInvalidError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        model.load_weights(weights.items())


def test_a_wrong_shape_is_shown_beside_the_right_one() -> None:
    _, model, weights = checkpoint()
    weights[Q_NAME] = torch.zeros(64, 47)
    with pytest.raises(WeightsInvalidError, match=r"q_proj\.weight has shape \[64, 47\], .* asks for \[64, 48\]"):
        model.load_weights(weights.items())


def test_a_tensor_that_comes_twice_is_an_error() -> None:
    _, model, weights = checkpoint()
    with pytest.raises(WeightsInvalidError, match="twice"):
        model.load_weights([*weights.items(), (Q_NAME, weights[Q_NAME])])


def test_many_missing_tensors_are_counted() -> None:
    _, model, _ = checkpoint()
    with pytest.raises(WeightsInvalidError, match="and 21 more"):
        model.load_weights([])


def test_buffers_and_tied_copies_in_a_checkpoint_are_ignored() -> None:
    _, model, weights = checkpoint()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    weights["lm_head.weight"] = torch.zeros(320, 48)
    model.load_weights(weights.items())


def test_an_untied_model_needs_its_head() -> None:
    config, _, weights = checkpoint()
    model = create_model(dataclasses.replace(config, tie_word_embeddings=False), context())
    with pytest.raises(WeightsInvalidError, match=r"missing: lm_head\.weight"):
        model.load_weights(weights.items())


def test_other_dtypes_are_converted() -> None:
    path = make_checkpoint("llama", dtype="bfloat16")
    assert load_model(path).context.dtype is torch.float32


def test_an_unknown_architecture_is_named() -> None:
    config, _, _ = checkpoint()
    with pytest.raises(UnsupportedModelError, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        create_model(dataclasses.replace(config, architecture="MambaForCausalLM"), context())


def test_an_unknown_activation_is_named() -> None:
    config, _, _ = checkpoint()
    with pytest.raises(UnsupportedModelError, match="'relu2'"):
        create_model(dataclasses.replace(config, hidden_activation="relu2"), context())


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "features", "what"),
    [(2, 9, 3, 96, "9 attention heads"), (4, 12, 3, 96, "3 KV heads"), (5, 5, 5, 96, "96 features of gate_proj")],
)
def test_an_indivisible_tensor_parallel_size_is_an_error(
    size: int, heads: int, kv_heads: int, features: int, what: str
) -> None:
    config, _, _ = checkpoint()
    config = dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=features)
    with pytest.raises(InvalidTensorParallelError, match=what):
        create_model(config, context(TensorParallel(rank=0, size=size)))


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [(0, 4)]), (2, [(0, 2), (2, 2)]), (8, [(r // 2, 1) for r in range(8)])]
)
def test_kv_heads_are_split_or_replicated(size: int, expected: list[tuple[int, int]]) -> None:
    found = [TensorParallel(rank=rank, size=size).split_kv_heads(4) for rank in range(size)]
    assert found == expected
