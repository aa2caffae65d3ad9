"""Runs one `ForwardBatch` on one rank: arrays to tensors, forward pass, logits. Every rank does exactly this, in step.

The order of collectives is fixed: forward, prompt logits chunk by chunk, sample logits. Rank 0 alone gets logits and goes
on in `model_runner`. Shape suffixes: T tokens, C hidden features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvferry_engine.attention.metadata import AttentionMetadata, make_metadata
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.runner.batch import ForwardBatch
from kvferry_engine.runner.cuda_graphs import DecodeGraphs

PROMPT_LOGITS_CHUNK = 256
"""Rows of prompt logits alive at a time: 256 x 150 000 fp32 are 150 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A batch on the device."""

    token_ids: Tensor
    metadata: AttentionMetadata
    sample_indices: Tensor
    prompt_indices: Tensor


class ModelExecutor:
    """The model of one rank with its KV cache and, on a GPU, its graphs."""

    def __init__(self, model: CausalLM, storage: Tensor, *, graphs: DecodeGraphs | None) -> None:
        self.model = model
        self.storage = storage
        self._device = model.context.device
        self._graphs = graphs

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, previous_ids: Tensor | None) -> tuple[Tensor, StepTensors]:
        """Return the hidden states [T, C] of a batch.

        `previous_ids` int64 are the ids sampled by the step before, on the device; needed when the batch carries tokens.
        """
        tensors = self._tensors(batch)
        if len(batch.carry_to):
            assert previous_ids is not None
            carried = previous_ids[self._upload(batch.carry_from)]
            tensors.token_ids[self._upload(batch.carry_to)] = carried.to(tensors.token_ids.dtype)
        if self._graphs is not None and batch.is_decode_only and self._graphs.covers(batch.num_rows):
            return self._graphs.replay(tensors.token_ids, tensors.metadata), tensors
        return self.model.forward(tensors.token_ids, self.storage, tensors.metadata), tensors

    @torch.inference_mode()
    def prompt_logits(self, hidden_TC: Tensor, tensors: StepTensors) -> Iterator[Tensor | None]:
        """Yield the logits of the batch's prompt_indices in pieces of at most PROMPT_LOGITS_CHUNK rows; None off rank 0."""
        for first in range(0, len(tensors.prompt_indices), PROMPT_LOGITS_CHUNK):
            yield self.model.logits(hidden_TC[tensors.prompt_indices[first : first + PROMPT_LOGITS_CHUNK]])

    @torch.inference_mode()
    def sample_logits(self, hidden_TC: Tensor, tensors: StepTensors) -> Tensor | None:
        """Return fp32 logits of the batch's sample_indices; None when there are none, and off rank 0."""
        if not len(tensors.sample_indices):
            return None
        if len(tensors.sample_indices) != hidden_TC.shape[0]:
            hidden_TC = hidden_TC[tensors.sample_indices]
        return self.model.logits(hidden_TC)

    def share_ids(self, ids: Tensor) -> Tensor:
        """Give rank 0's sampled ids [S] to every GPU rank, whose next step may need them before rank 0 has seen them.

        Other ranks pass a tensor to be overwritten. CPU ranks need nothing: ids come with the next batch.
        """
        if self._device.type == "cuda":
            self.model.context.parallel.broadcast(ids)
        return ids

    def _tensors(self, batch: ForwardBatch) -> StepTensors:
        arrays = (
            batch.positions,
            batch.slots,
            batch.sample_indices,
            batch.prompt_indices,
            batch.token_ids,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
        )
        upload = (
            self._upload_all(arrays) if self._device.type != "cpu" else [torch.from_numpy(array) for array in arrays]
        )
        positions, slots, sample, prompt, token_ids, tables, starts, lengths = upload
        metadata = make_metadata(
            positions_T=positions,
            slots_T=slots,
            block_tables_BM=tables,
            query_starts=starts,
            seq_lens_B=lengths,
            num_decode_rows=batch.num_decode_rows,
            max_query_len=batch.max_query_len,
        )
        return StepTensors(token_ids=token_ids, metadata=metadata, sample_indices=sample, prompt_indices=prompt)

    def _upload(self, array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _upload_all(
        self, arrays: tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32 | np.int64]], ...]
    ) -> list[Tensor]:
        """Copy arrays (int64 ones first) to the device in one transfer.

        The pinned buffer comes from torch's host allocator, which hands it out again only after the copy has run.
        """
        staging = torch.empty(sum(array.nbytes for array in arrays), dtype=torch.uint8, pin_memory=True)
        flat, offset = staging.numpy(), 0
        for array in arrays:
            flat[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offset += array.nbytes
        on_device = staging.to(self._device, non_blocking=True)
        views, offset = [], 0
        for array in arrays:
            dtype = torch.int64 if array.dtype == np.int64 else torch.int32
            views.append(on_device[offset : offset + array.nbytes].view(dtype).view(array.shape))
            offset += array.nbytes
        return views
