"""Llama 1 to 3 and every model with its shape, SmolLM2 among them: full attention, gated SiLU MLP, optional biases."""

from __future__ import annotations

from kvferry_engine.config import ModelConfig
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.decoder import PreNormLayer


def build(config: ModelConfig, context: LayerContext) -> CausalLM:
    """Return the model without weights. Raises InvalidTensorParallelError, UnsupportedModelError."""
    return CausalLM(config, context, [PreNormLayer(config, context) for _ in range(config.num_layers)])
