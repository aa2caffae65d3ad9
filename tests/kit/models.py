"""Builds our model of a tiny checkpoint and a runner for it, without the loader: config and safetensors are read directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kit.steps import GreedySampler, weights_of
from kvferry_engine.config import LogprobsMode, ModelConfig
from kvferry_engine.kv_cache.storage import allocate, make_layout
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.loader.hf_config import model_config
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.registry import create_model
from kvferry_engine.runner.executor import ModelExecutor
from kvferry_engine.runner.model_runner import ModelRunner
from kvferry_kernels.dispatch import Backend

CPU = torch.device("cpu")


def read_config(path: Path) -> ModelConfig:
    """The `ModelConfig` of a checkpoint folder."""
    return model_config(json.loads((path / "config.json").read_text()))


def load_model(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    backend: Backend = Backend.CPU,
    device: torch.device = CPU,
    max_model_len: int | None = None,
) -> CausalLM:
    """Our model with the checkpoint's weights."""
    config = read_config(path)
    context = LayerContext(
        dtype=dtype, device=device, backend=backend, max_model_len=max_model_len or config.max_position
    )
    model = create_model(config, context)
    model.load_weights(weights_of(path))
    return model


def make_runner(model: CausalLM, *, num_blocks: int = 64, block_size: int = 16, sampler: Any = None) -> ModelRunner:
    """A CPU runner with a poisoned KV cache: reading a slot that was not written shows as NaN."""
    config, context = model.config, model.context
    layout = make_layout(config, num_kv_heads=config.num_kv_heads, block_size=block_size, dtype=context.dtype)
    storage = allocate(layout, num_blocks, context.device).fill_(float("nan"))
    return ModelRunner(
        executor=ModelExecutor(model, storage, graphs=None),
        sampler=sampler or GreedySampler(),
        logprobs_mode=LogprobsMode.RAW_LOGPROBS,
        block_size=block_size,
    )
