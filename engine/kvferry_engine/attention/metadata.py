"""What attention needs to know about a step besides q, k and v: where every token lives in the paged cache.

Rows come decode first: rows [0, num_decode_rows) have one new token each, the others are chunks of prompts. Tensors are
on the device of the model. Shape suffixes: T tokens, B rows, M blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True, frozen=True)
class PrefillRows:
    """The rows of a step that are chunks of prompts. `query_starts` counts from the first token of these rows."""

    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    max_query_len: int


@dataclass(slots=True, kw_only=True, frozen=True)
class AttentionMetadata:
    """One step: positions int64 [T], slots int64 [T] (block * block_size + offset, negative: not written).

    decode_block_tables int32 [num_decode_rows, M] and decode_seq_lens int32 [num_decode_rows] (the new token counted).
    """

    positions: Tensor
    slots: Tensor
    num_decode_rows: int
    decode_block_tables: Tensor
    decode_seq_lens: Tensor
    prefill: PrefillRows | None


def make_metadata(
    *,
    positions_T: Tensor,
    slots_T: Tensor,
    block_tables_BM: Tensor,
    query_starts: Tensor,
    seq_lens_B: Tensor,
    num_decode_rows: int,
    max_query_len: int,
) -> AttentionMetadata:
    """Split a step's arrays into its decode and prefill rows; query_starts int32 [B + 1], views are taken where possible."""
    num_rows = seq_lens_B.shape[0]
    prefill = None
    if num_decode_rows < num_rows:
        prefill = PrefillRows(
            block_tables=block_tables_BM[num_decode_rows:],
            query_starts=query_starts[num_decode_rows:] - num_decode_rows if num_decode_rows else query_starts,
            seq_lens=seq_lens_B[num_decode_rows:],
            max_query_len=max_query_len,
        )
    return AttentionMetadata(
        positions=positions_T,
        slots=slots_T,
        num_decode_rows=num_decode_rows,
        decode_block_tables=block_tables_BM[:num_decode_rows],
        decode_seq_lens=seq_lens_B[:num_decode_rows],
        prefill=prefill,
    )
