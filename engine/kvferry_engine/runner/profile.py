"""Measures how much GPU memory a full step needs besides weights and KV, so that the rest can become KV cache."""

from __future__ import annotations

import numpy as np
import torch

from kvferry_engine.kv_cache.storage import StorageLayout, allocate
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.runner.batch import ForwardBatch
from kvferry_engine.runner.executor import ModelExecutor


def peak_activation_bytes(
    model: CausalLM, layout: StorageLayout, *, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Return the peak of memory allocated during a step of the full token budget, over what was allocated before it.

    Runs that step once, every rank together: prompts of one block each, all in the same block of a one-block cache. Logits
    of max_num_seqs rows are made twice, the second set standing for the sampler's copies.
    """
    device = model.context.device
    storage = allocate(layout, 1, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    executor = ModelExecutor(model, storage, graphs=None)
    hidden, tensors = executor.forward(_full_batch(layout.block_size, max_num_batched_tokens, max_num_seqs), None)
    first = executor.sample_logits(hidden, tensors)
    second = None if first is None else first.clone()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden, tensors, first, second, executor, storage
    torch.cuda.empty_cache()
    return peak


def _full_batch(block_size: int, num_tokens: int, max_num_seqs: int) -> ForwardBatch:
    query_starts = np.append(np.arange(0, num_tokens, block_size), num_tokens).astype(np.int32)
    positions = np.arange(num_tokens, dtype=np.int64) % block_size
    lengths = np.diff(query_starts).astype(np.int32)
    nothing = np.zeros(0, dtype=np.int64)
    return ForwardBatch(
        number=0,
        num_decode_rows=0,
        max_query_len=int(lengths.max()),
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=positions,
        slots=positions,
        block_tables=np.zeros((len(lengths), 1), dtype=np.int32),
        query_starts=query_starts,
        seq_lens=lengths,
        sample_indices=np.arange(min(max_num_seqs, num_tokens), dtype=np.int64),
        prompt_indices=nothing,
        carry_from=nothing,
        carry_to=nothing,
    )
