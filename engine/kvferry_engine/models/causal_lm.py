"""A decoder-only language model around any list of layers: embedding, layers, final norm, head, and the loading of weights.

Shape suffixes: T tokens, n rows asked for, C hidden features, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvferry_engine.attention.metadata import AttentionMetadata
from kvferry_engine.config import ModelConfig
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.embedding import LanguageModelHead, VocabEmbedding
from kvferry_engine.layers.norm import RMSNorm
from kvferry_engine.layers.rotary import RopeShape, cos_sin_table
from kvferry_engine.layers.weights import Slots, fill

HEAD_NAME = "lm_head.weight"
COMPUTED_BUFFER = "rotary_emb.inv_freq"


class DecoderLayer(Protocol):
    """One layer; see `decoder.PreNormLayer` for the contract of the call."""

    def slots(self, prefix: str) -> Slots: ...

    def __call__(
        self, x_TC: Tensor, residual_TC: Tensor, cos_sin: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor: ...


class CausalLM:
    """Token ids to hidden states to logits, over a paged KV cache."""

    def __init__(self, config: ModelConfig, context: LayerContext, layers: Sequence[DecoderLayer]) -> None:
        self.config = config
        self.context = context
        self._embedding = VocabEmbedding(config.vocab_size, config.hidden_size, context=context)
        self._layers = list(layers)
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self._head = LanguageModelHead(config.vocab_size, config.hidden_size, context=context)
        shape = RopeShape(
            head_dim=config.head_dim, max_position=config.max_position, max_model_len=context.max_model_len
        )
        self._cos_sin = cos_sin_table(config.rope, shape, context.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the model from Hugging Face names; once. Raises WeightsInvalidError for missing, unexpected or misshapen ones."""
        is_tied = self.config.tie_word_embeddings
        slots = self._embedding.slots("model.embed_tokens") | self._norm.slots("model.norm")
        for index, layer in enumerate(self._layers):
            slots |= layer.slots(f"model.layers.{index}")
        if not is_tied:
            slots |= self._head.slots("lm_head")
        fill(slots, weights, ignored=lambda name: name.endswith(COMPUTED_BUFFER) or (is_tied and name == HEAD_NAME))
        if is_tied:
            self._head.tie(self._embedding.weight_RC)

    def forward(self, token_ids_T: Tensor, kv_storage: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the final hidden states [T, C]; writes keys and values into `kv_storage` [L, blocks, 2, K, slots, H].

        The residual stream is fp32 whatever the model's type: it grows with depth (SmolLM2's reaches 24 900, where
        neighbouring bf16 numbers are 128 apart), and it is only read and written by the norms.
        """
        x_TC = self._embedding(token_ids_T)
        residual_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        for layer, kv in zip(self._layers, kv_storage.unbind(0), strict=True):
            x_TC = layer(x_TC, residual_TC, self._cos_sin, kv, metadata)
        return self._norm.add(x_TC, residual_TC)

    def logits(self, hidden_nC: Tensor) -> Tensor | None:
        """Return fp32 logits [n, V] on rank 0, None on other ranks; every rank must call it with the same rows."""
        return self._head(hidden_nC)
