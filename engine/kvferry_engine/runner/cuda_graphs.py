"""CUDA graphs of decode steps: one recording per batch bucket, replayed over static buffers to save launch time.

A graph covers embedding to final norm; logits and sampling run after it, since their shapes follow the requests. Rows
that only fill up a bucket have length 0 and slot -1: attention yields zeros for them and nothing is written.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.attention.metadata import AttentionMetadata, make_metadata
from kvferry_engine.models.causal_lm import CausalLM

log = logging.getLogger(__name__)

MAX_BUCKET = 512
WARMUP_STEPS = 2


def buckets(max_num_seqs: int) -> list[int]:
    """Return batch sizes to record: 1, 2, 4, then multiples of 8 to 256 and of 16 beyond, up to what can be needed."""
    top = min(max_num_seqs, MAX_BUCKET)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, MAX_BUCKET + 1, 16)]
    kept = [size for size in sizes if size < top]
    return [*kept, top]


@dataclass(frozen=True, slots=True)
class _StaticInputs:
    """Buffers for the largest bucket; a graph of bucket n reads their first n rows."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    def metadata(self, num_rows: int) -> AttentionMetadata:
        return make_metadata(
            positions_T=self.positions[:num_rows],
            slots_T=self.slots[:num_rows],
            block_tables_BM=self.block_tables[:num_rows],
            query_starts=self.query_starts[: num_rows + 1],
            seq_lens_B=self.seq_lens[:num_rows],
            num_decode_rows=num_rows,
            max_query_len=0,
        )


class DecodeGraphs:
    """Recordings of the model's decode forward; make it once the weights and the KV storage are in place."""

    def __init__(self, model: CausalLM, storage: Tensor, *, max_num_seqs: int, max_blocks_per_row: int) -> None:
        """Record every bucket, largest first so that all share its memory pool. Takes seconds; must run on every rank."""
        device = model.context.device
        self._sizes = buckets(max_num_seqs)
        top = self._sizes[-1]
        self._inputs = _StaticInputs(
            token_ids=torch.zeros(top, dtype=torch.int32, device=device),
            positions=torch.zeros(top, dtype=torch.int64, device=device),
            slots=torch.full((top,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(top, max_blocks_per_row, dtype=torch.int32, device=device),
            query_starts=torch.arange(top + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(top, dtype=torch.int32, device=device),
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for size in reversed(self._sizes):
            self._graphs[size] = self._record(model, storage, size)
        log.info("cuda graphs recorded buckets=%d largest=%d", len(self._sizes), top)

    def covers(self, num_rows: int) -> bool:
        """There is a bucket for this many decode rows."""
        return num_rows <= self._sizes[-1]

    def replay(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run a decode-only step; returns hidden states [T, C], valid until the next replay."""
        num_rows = token_ids_T.shape[0]
        size = next(size for size in self._sizes if size >= num_rows)
        inputs = self._inputs
        inputs.token_ids[:num_rows].copy_(token_ids_T)
        inputs.positions[:num_rows].copy_(metadata.positions)
        inputs.slots[:num_rows].copy_(metadata.slots)
        inputs.block_tables[:num_rows, : metadata.decode_block_tables.shape[1]].copy_(metadata.decode_block_tables)
        inputs.seq_lens[:num_rows].copy_(metadata.decode_seq_lens)
        if num_rows < size:
            inputs.slots[num_rows:size].fill_(-1)
            inputs.seq_lens[num_rows:size].zero_()
        graph, hidden_TC = self._graphs[size]
        graph.replay()
        return hidden_TC[:num_rows]

    @torch.inference_mode()
    def _record(self, model: CausalLM, storage: Tensor, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        token_ids, metadata = self._inputs.token_ids[:size], self._inputs.metadata(size)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                model.forward(token_ids, storage, metadata)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_TC = model.forward(token_ids, storage, metadata)
        return graph, hidden_TC
