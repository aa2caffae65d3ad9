"""Random weights of a real model's shape: for tests and speed measurements without a checkpoint.

Each tensor depends on the seed and its name only, so every rank and every engine draws the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry_engine.config import ModelConfig
from kvferry_engine.loader.identity import dummy_weights_id
from kvferry_engine.loader.progress import Progress
from kvferry_engine.wire.assets import AssetBundle

if TYPE_CHECKING:
    from kvferry_engine.loader.source import ModelSource

STANDARD_DEVIATION = 0.02


class DummySource:
    """See `source.ModelSource`; config and assets are those of another source."""

    def __init__(self, inner: ModelSource, seed: int) -> None:
        self.root = inner.root
        self.config: ModelConfig = inner.config
        self._inner = inner
        self._seed = seed

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        itemsize = self._dtype.itemsize
        return sum(itemsize * torch.Size(shape).numel() for shape in tensor_shapes(self.config).values())

    def assets(self, *, chat_template: str | None = None, generation_config: str = "auto") -> AssetBundle:
        """See `source.ModelSource.assets`."""
        return self._inner.assets(chat_template=chat_template, generation_config=generation_config)

    def weights(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `source.ModelSource.weights`."""
        for name, shape in tensor_shapes(self.config).items():
            tensor = _random(name, shape, self._seed).to(self._dtype)
            yield name, tensor
            if progress is not None:
                progress(tensor.nbytes)

    def weights_id(self) -> str:
        """See `source.ModelSource.weights_id`."""
        return dummy_weights_id(self.config.hf, self._seed)

    @property
    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint by their Hugging Face names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": ((q_size, hidden), config.attention_bias),
        "self_attn.k_proj": ((kv_size, hidden), config.attention_bias),
        "self_attn.v_proj": ((kv_size, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, q_size), config.output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (shape, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _random(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
