"""The parts that pre-norm decoder models share: attention block, gated MLP and the layer that joins them.

An architecture file (`llama`, `qwen2`, ...) picks and parametrises these parts; it never subclasses them.
Shape suffixes: T tokens, C hidden features, N query heads, K key/value heads, H head dim, I inner features (of this rank).
"""

from __future__ import annotations

from torch import Tensor

from kvferry_engine.attention.metadata import AttentionMetadata
from kvferry_engine.attention.paged import PagedAttention
from kvferry_engine.config import ModelConfig
from kvferry_engine.layers.activation import gated_activation
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.linear import ColumnLinear, RowLinear, even_part, kv_part, query_part
from kvferry_engine.layers.norm import RMSNorm
from kvferry_engine.layers.weights import Slots


class AttentionBlock:
    """Projections, optional per-head norms of q and k, rotary positions and paged attention."""

    def __init__(self, config: ModelConfig, context: LayerContext, *, sliding_window: int = 0) -> None:
        parallel = context.parallel
        query = query_part("q_proj", config.num_heads, config.head_dim, parallel)
        key = kv_part("k_proj", config.num_kv_heads, config.head_dim, parallel)
        value = kv_part("v_proj", config.num_kv_heads, config.head_dim, parallel)
        self._num_heads = [part.rows // config.head_dim for part in (query, key, value)]
        self._head_dim = config.head_dim
        self._qkv = ColumnLinear(config.hidden_size, [query, key, value], bias=config.attention_bias, context=context)
        self._output = RowLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias, context=context
        )
        self._q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context=context) if config.qk_norm else None
        self._k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context=context) if config.qk_norm else None
        self._attention = PagedAttention(
            backend=context.backend,
            scale=config.head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=config.attention_soft_cap,
        )

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names below `prefix` (`...self_attn`)."""
        slots = self._qkv.slots(prefix) | self._output.slots(f"{prefix}.o_proj")
        for name, norm in (("q_norm", self._q_norm), ("k_norm", self._k_norm)):
            if norm is not None:
                slots |= norm.slots(f"{prefix}.{name}")
        return slots

    def __call__(self, x_TC: Tensor, cos_sin: Tensor, kv: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return [T, C]; writes the tokens' keys and values into `kv`."""
        merged = self._qkv(x_TC).view(x_TC.shape[0], -1, self._head_dim)
        q_TNH, k_TKH, v_TKH = merged.split_with_sizes(self._num_heads, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q_TNH, k_TKH = self._q_norm.per_head(q_TNH), self._k_norm.per_head(k_TKH)
        attended_TNH = self._attention(q_TNH, k_TKH, v_TKH, cos_sin, kv, metadata)
        return self._output(attended_TNH.flatten(1))


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        parts = [even_part(name, config.intermediate_size, context.parallel) for name in ("gate_proj", "up_proj")]
        self._gate_up = ColumnLinear(config.hidden_size, parts, bias=config.mlp_bias, context=context)
        self._down = RowLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, context=context)
        self._activation = gated_activation(config.hidden_activation, context.backend)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names below `prefix` (`...mlp`)."""
        return self._gate_up.slots(prefix) | self._down.slots(f"{prefix}.down_proj")

    def __call__(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        return self._down(self._activation(self._gate_up(x_TC)))


class PreNormLayer:
    """Norm, attention, residual; norm, MLP, residual. The sum that closes a layer is fused with the next layer's norm."""

    def __init__(self, config: ModelConfig, context: LayerContext, *, sliding_window: int = 0) -> None:
        self._input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self._attention = AttentionBlock(config, context, sliding_window=sliding_window)
        self._post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self._mlp = GatedMLP(config, context)

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names below `prefix` (`model.layers.<i>`)."""
        return (
            self._input_norm.slots(f"{prefix}.input_layernorm")
            | self._attention.slots(f"{prefix}.self_attn")
            | self._post_norm.slots(f"{prefix}.post_attention_layernorm")
            | self._mlp.slots(f"{prefix}.mlp")
        )

    def __call__(
        self, x_TC: Tensor, residual_TC: Tensor, cos_sin: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the MLP's output [T, C], not yet added to `residual_TC` (fp32), which is updated in place.

        `x_TC` is what the layer before has not added yet; the embedding in the first layer.
        """
        normed = self._input_norm.add(x_TC, residual_TC)
        attended = self._attention(normed, cos_sin, kv, metadata)
        return self._mlp(self._post_norm.add(attended, residual_TC))
