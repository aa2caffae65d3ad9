"""Mistral: the Llama layer with one sliding window for all layers (versions of the model since 0.2 have none)."""

from __future__ import annotations

from kvferry_engine.config import ModelConfig
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.decoder import PreNormLayer


def build(config: ModelConfig, context: LayerContext) -> CausalLM:
    """Return the model without weights. Raises InvalidTensorParallelError, UnsupportedModelError."""
    layers = [PreNormLayer(config, context, sliding_window=config.sliding_window) for _ in range(config.num_layers)]
    return CausalLM(config, context, layers)
