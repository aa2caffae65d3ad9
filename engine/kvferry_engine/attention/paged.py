"""Attention over the paged cache: rotates and stores new keys, then attends with the kernel that suits each kind of row.

Shape suffixes: T tokens, N query heads, K key/value heads, H head dim (all of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.attention.metadata import AttentionMetadata
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.paged_attention import decode_attention
from kvferry_kernels.rope_kv import rope_and_write
from kvferry_kernels.varlen_attention import prefill_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """Attention of one layer. `sliding_window` 0: all tokens are seen; `soft_cap` 0: scores are not capped."""

    backend: Backend
    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0

    def __call__(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cos_sin: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Return [T, N, H]. `q_TNH` is rotated in place; rotated keys and values are written to `kv` [blocks, 2, K, slots, H].

        q, k and v may be views of one merged tensor (dense heads, any token stride); cos_sin as `rotary.cos_sin_table`.
        """
        rope_and_write(q_TNH, k_TKH, v_TKH, metadata.positions, cos_sin, kv, metadata.slots, backend=self.backend)
        num_decode, prefill = metadata.num_decode_rows, metadata.prefill
        if prefill is None:
            return self._decode(q_TNH, kv, metadata)
        if num_decode == 0:
            return self._prefill(q_TNH, kv, metadata)
        return torch.cat(
            (self._decode(q_TNH[:num_decode], kv, metadata), self._prefill(q_TNH[num_decode:], kv, metadata))
        )

    def _decode(self, q_TNH: Tensor, kv: Tensor, metadata: AttentionMetadata) -> Tensor:
        return decode_attention(
            q_TNH,
            kv,
            metadata.decode_block_tables,
            metadata.decode_seq_lens,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            backend=self.backend,
        )

    def _prefill(self, q_TNH: Tensor, kv: Tensor, metadata: AttentionMetadata) -> Tensor:
        rows = metadata.prefill
        assert rows is not None
        return prefill_attention(
            q_TNH,
            kv,
            rows.block_tables,
            rows.query_starts,
            rows.seq_lens,
            scale=self.scale,
            max_query_len=rows.max_query_len,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            backend=self.backend,
        )
