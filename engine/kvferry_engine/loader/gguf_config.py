"""Translates GGUF metadata to a Hugging Face config, so that both formats reach `ModelConfig` through `hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gguf import GGMLQuantizationType

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError
from kvferry_engine.loader.gguf_file import GgufFile, GgufTensor
from kvferry_engine.loader.gguf_weights import read_tensor
from kvferry_engine.loader.hf_config import MODEL_TYPES, model_config

ARCHITECTURES = ("llama", "qwen2", "qwen3")
INTERLEAVED = ("llama",)
"""Architectures whose q and k rows llama.cpp reorders."""
DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
QUANTISED_DTYPE = "bfloat16"


class Metadata:
    """Access to the values of one architecture, with errors that name the key."""

    def __init__(self, file: GgufFile) -> None:
        """Raises WeightsInvalidError without an architecture and UnsupportedModelError for other ones than ours."""
        self._values: Mapping[str, Any] = file.metadata
        self._path = file.path
        architecture = self._values.get("general.architecture")
        if not isinstance(architecture, str):
            raise WeightsInvalidError(f"{file.path} does not say its architecture (general.architecture)")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        """Return `<architecture>.<key>`; a list of equal values, one a layer, counts as that value."""
        value = self._values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if not value or any(entry != value[0] for entry in value):
                raise UnsupportedModelError(f"{self._path}: {self.architecture}.{key} differs between layers")
            return value[0]
        return value

    def need(self, key: str) -> Any:
        """As `get`; raises WeightsInvalidError when it is missing."""
        value = self.get(key)
        if value is None:
            raise WeightsInvalidError(f"{self._path} lacks the metadata {self.architecture}.{key}")
        return value


def gguf_model_config(files: list[GgufFile], eos_token_ids: list[int], bos_token_id: int | None) -> ModelConfig:
    """Return the config of a model; `files` are its shards, the first one has the metadata.

    Raises WeightsInvalidError and UnsupportedModelError.
    """
    values = Metadata(files[0])
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    if values.get("expert_count"):
        raise UnsupportedModelError("GGUF mixture-of-experts models are not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsInvalidError(f"{files[0].path} has no token_embd.weight of two dimensions")
    num_heads, hidden_size = values.need("attention.head_count"), values.need("embedding_length")
    head_dim = values.get("attention.key_length") or hidden_size // max(num_heads, 1)
    model_type = values.architecture
    hf = {
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": values.need("feed_forward_length"),
        "num_hidden_layers": values.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.need("context_length"),
        "rms_norm_eps": values.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(values, files, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "dtype": _dtype(list(tensors.values())),
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_ids or None,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    config = model_config(hf)
    return replace(
        config, attention_bias="blk.0.attn_q.bias" in tensors, output_bias="blk.0.attn_output.bias" in tensors
    )


def _dtype(tensors: list[GgufTensor]) -> str:
    """Return the type to compute in: that of most of the bytes; quantised weights are expanded to bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        dtype = DTYPES.get(tensor.kind, QUANTISED_DTYPE)
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope(values: Metadata, files: list[GgufFile], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values.get("rope.freq_base", 10_000.0)}
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    factors = _frequency_factors(files)
    if factors is not None:
        # Llama 3.1's scaling comes as divisors of the frequencies, which is what longrope's factors are.
        original = values.get("rope.scaling.original_context_length") or values.need("context_length")
        return rope | {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    kind = values.get("rope.scaling.type", "none")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"GGUF rope scaling {kind} is not supported; supported: linear, yarn, rope_freqs")
    rope |= {"rope_type": kind, "factor": factor}
    original = values.get("rope.scaling.original_context_length")
    if original:
        rope["original_max_position_embeddings"] = original
    return rope


def _frequency_factors(files: list[GgufFile]) -> list[float] | None:
    for file in files:
        tensor = file.tensors.get("rope_freqs.weight")
        if tensor is not None:
            factors: list[float] = read_tensor(file, tensor).float().tolist()
            return factors
    return None
