"""Turns a Hugging Face config.json, of old and new style, into the engine's `ModelConfig`.

Values that a config leaves out have the defaults of the model class (transformers writes only what differs from them); they
are repeated here per architecture. GGUF metadata comes through here as well, translated to the same keys by `gguf_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError

_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3ForCausalLM": {**_QWEN_DEFAULTS, "head_dim": 128},
}
"""Supported architectures with the defaults of their Hugging Face configs (transformers 5)."""

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = ("bfloat16", "float16", "float32")


def model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, checkpoint_dtype: str = "float32"
) -> ModelConfig:
    """Return the model's config.

    `generation` is generation_config.json; `checkpoint_dtype` counts when the config names none. Raises
    UnsupportedModelError for what the engine cannot run, WeightsInvalidError for missing or senseless values.
    """
    architecture = _architecture(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({method}); use an unquantised safetensors checkpoint or a GGUF file"
        )
    values = {**ARCHITECTURES[architecture], **raw}
    hidden_size, num_heads = _count(values, "hidden_size"), _count(values, "num_attention_heads")
    num_kv_heads = num_heads if values.get("num_key_value_heads") is None else _count(values, "num_key_value_heads")
    num_layers = _count(values, "num_hidden_layers")
    head_dim = hidden_size // num_heads if values.get("head_dim") is None else _count(values, "head_dim")
    if num_heads % num_kv_heads:
        raise WeightsInvalidError(
            f"the config has {num_heads} attention heads, which is no multiple of its {num_kv_heads} key/value heads"
        )
    is_llama, is_qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    has_bias_flag = (is_llama or is_qwen3) and bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_count(values, "max_position_embeddings"),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=_rope(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=has_bias_flag or architecture == "Qwen2ForCausalLM",
        output_bias=has_bias_flag,
        mlp_bias=is_llama and bool(values.get("mlp_bias", False)),
        qk_norm=is_qwen3,
        sliding_window=_sliding_window(architecture, values),
        layer_types=_layer_types(architecture, values, num_layers),
        hidden_activation=str(values.get("hidden_act", "silu")),
        dtype=_dtype(values, checkpoint_dtype),
        eos_token_ids=token_ids(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        hf=dict(raw),
    )


def token_ids(*values: Any) -> tuple[int, ...]:
    """Return the ids of values that are an int, a list of ints or None, in order and once each."""
    ids: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids[token_id] = None
    return tuple(ids)


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [MODEL_TYPES.get(str(raw.get("model_type")), str(raw.get("model_type")))]
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, named))} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        given = "is missing" if value is None else f"is {value!r}"
        raise WeightsInvalidError(f"{key} {given} in the model's config, it must be a positive number")
    return value


def _dtype(values: Mapping[str, Any], checkpoint_dtype: str) -> str:
    named = str(values.get("dtype") or values.get("torch_dtype") or checkpoint_dtype).removeprefix("torch.")
    if named not in DTYPES:
        raise UnsupportedModelError(f"the checkpoint's dtype {named} is not supported; supported: {', '.join(DTYPES)}")
    return named


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters under the names of transformers 5, whichever style the config has."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    nested = [part for part in given.values() if isinstance(part, dict)]
    if nested:
        if any(part != nested[0] for part in nested):
            raise UnsupportedModelError("rope parameters that differ between layer types are not supported here")
        given = nested[0]
    rope = {key: value for key, value in given.items() if key != "type"}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    rope["rope_type"] = "longrope" if kind == "su" else kind
    for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        value = given.get(key, values.get(key, default))
        if value is not None:
            rope[key] = float(value)
    original = values.get("original_max_position_embeddings")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return rope


def _sliding_window(architecture: str, values: Mapping[str, Any]) -> int:
    if architecture == "LlamaForCausalLM" or not values.get("use_sliding_window", True):
        return 0
    return int(values.get("sliding_window") or 0)


def _layer_types(architecture: str, values: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Return the attention of each layer; empty for architectures in which all layers are the same."""
    if not architecture.startswith("Qwen"):
        return ()
    given = values.get("layer_types")
    if given is None:
        window = _sliding_window(architecture, values)
        first = int(values["max_window_layers"])
        given = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    unknown = {*given} - {"full_attention", "sliding_attention"}
    if unknown or len(given) != num_layers:
        raise UnsupportedModelError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers; "
            f"the config has {len(given)} entries of {sorted({*given})}"
        )
    return tuple(given)
