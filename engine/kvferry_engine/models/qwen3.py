"""Qwen3: the Llama layer with an RMS norm on every head of q and k and a sliding window on some layers."""

from __future__ import annotations

from kvferry_engine.config import ModelConfig
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.decoder import PreNormLayer
from kvferry_engine.models.windows import layer_windows


def build(config: ModelConfig, context: LayerContext) -> CausalLM:
    """Return the model without weights. Raises InvalidTensorParallelError, UnsupportedModelError."""
    layers = [PreNormLayer(config, context, sliding_window=window) for window in layer_windows(config)]
    return CausalLM(config, context, layers)
