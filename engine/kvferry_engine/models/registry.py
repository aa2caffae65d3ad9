"""The list of architectures the engine implements itself, by their Hugging Face class name."""

from __future__ import annotations

from collections.abc import Callable

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import UnsupportedModelError
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.models import llama, mistral, qwen2, qwen3
from kvferry_engine.models.causal_lm import CausalLM

ARCHITECTURES: dict[str, Callable[[ModelConfig, LayerContext], CausalLM]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def create_model(config: ModelConfig, context: LayerContext) -> CausalLM:
    """Return the model of a config, without weights.

    Raises UnsupportedModelError for an unknown architecture or option, InvalidTensorParallelError when the model cannot
    be split over the context's ranks.
    """
    build = ARCHITECTURES.get(config.architecture)
    if build is None:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return build(config, context)
