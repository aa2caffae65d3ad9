"""A step as flat arrays: what every rank needs to run it, and nothing of requests, sampling or text.

Rank 0 makes a `ForwardBatch` from the scheduler's plan; the other ranks receive its bytes over a local socket (msgspec).
`executor` turns it into tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry_engine.request import Int32
from kvferry_engine.scheduler.plan import PLACEHOLDER, StepPlan

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Arrays of one step with T tokens in B rows, decode rows first.

    token_ids int32 [T]; positions, slots int64 [T]; block_tables int32 [B, M]; query_starts int32 [B + 1]; seq_lens
    int32 [B] after the step. sample_indices int64 [S]: tokens whose logits are sampled, in row order; prompt_indices
    int64 [P]: tokens whose logits give prompt log-probs. carry_to int64 [K] are tokens whose id is still on the device:
    entry carry_from[k] of the ids sampled by the step before.
    """

    number: int
    num_decode_rows: int
    max_query_len: int
    token_ids: Int32
    positions: Int64
    slots: Int64
    block_tables: Int32
    query_starts: Int32
    seq_lens: Int32
    sample_indices: Int64
    prompt_indices: Int64
    carry_from: Int64
    carry_to: Int64

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def is_decode_only(self) -> bool:
        """Every row has one new token."""
        return self.num_decode_rows == self.num_rows


class BatchMessage(msgspec.Struct, array_like=True, frozen=True):
    """A `ForwardBatch` as bytes: little-endian arrays in the order of its fields."""

    number: int
    num_decode_rows: int
    max_query_len: int
    num_rows: int
    int32: list[bytes]
    int64: list[bytes]


def to_message(batch: ForwardBatch) -> BatchMessage:
    """Return the message that `from_message` turns into an equal batch."""
    int32 = (batch.token_ids, batch.block_tables, batch.query_starts, batch.seq_lens)
    int64 = (batch.positions, batch.slots, batch.sample_indices, batch.prompt_indices, batch.carry_from, batch.carry_to)
    return BatchMessage(
        number=batch.number,
        num_decode_rows=batch.num_decode_rows,
        max_query_len=batch.max_query_len,
        num_rows=batch.num_rows,
        int32=[array.astype("<i4", copy=False).tobytes() for array in int32],
        int64=[array.astype("<i8", copy=False).tobytes() for array in int64],
    )


def from_message(message: BatchMessage) -> ForwardBatch:
    """Return the batch; its arrays are writable copies."""
    token_ids, block_tables, query_starts, seq_lens = (
        np.frombuffer(data, "<i4").astype(np.int32) for data in message.int32
    )
    positions, slots, sample, prompt, carry_from, carry_to = (
        np.frombuffer(data, "<i8").astype(np.int64) for data in message.int64
    )
    return ForwardBatch(
        number=message.number,
        num_decode_rows=message.num_decode_rows,
        max_query_len=message.max_query_len,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=block_tables.reshape(message.num_rows, -1),
        query_starts=query_starts,
        seq_lens=seq_lens,
        sample_indices=sample,
        prompt_indices=prompt,
        carry_from=carry_from,
        carry_to=carry_to,
    )


def make_batch(plan: StepPlan, *, block_size: int, previous_rows: dict[int, int]) -> ForwardBatch:
    """Lay out a plan.

    `previous_rows` maps sequence handles to their entry in the ids sampled by the step launched before this one; it must
    have every sequence that carries a PLACEHOLDER.
    """
    counts = plan.counts
    num_tokens = len(plan.token_ids)
    query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    if plan.num_decode_rows == len(counts):
        row_of_token = np.arange(num_tokens)
        positions = plan.starts.astype(np.int64)
    else:
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(num_tokens, dtype=np.int64) + (plan.starts - query_starts[:-1])[row_of_token]
    blocks = plan.block_tables[row_of_token, positions // block_size].astype(np.int64)
    carry_to = np.flatnonzero(plan.token_ids == PLACEHOLDER)
    carry_from = [previous_rows[plan.sequences[row].handle] for row in row_of_token[carry_to]]
    return ForwardBatch(
        number=plan.number,
        num_decode_rows=plan.num_decode_rows,
        max_query_len=int(counts[plan.num_decode_rows :].max(initial=0)),
        token_ids=plan.token_ids,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=plan.block_tables,
        query_starts=query_starts,
        seq_lens=(plan.starts + counts).astype(np.int32),
        sample_indices=(query_starts[1:][plan.samples] - 1).astype(np.int64),
        prompt_indices=prompt_logit_indices(plan, query_starts),
        carry_from=np.array(carry_from, dtype=np.int64),
        carry_to=carry_to.astype(np.int64),
    )


def num_prompt_logits(plan: StepPlan, row: int) -> int:
    """Return for how many of the row's tokens the log-prob of the following prompt token is wanted."""
    sequence = plan.sequences[row]
    if sequence.sampling.prompt_logprobs is None:
        return 0
    start, count = int(plan.starts[row]), int(plan.counts[row])
    return max(min(start + count, sequence.num_prompt - 1) - start, 0)


def prompt_logit_indices(plan: StepPlan, query_starts: Int32) -> Int64:
    """Return the tokens, in row order, whose logits give prompt log-probs."""
    pieces = [
        np.arange(query_starts[row], query_starts[row] + num_prompt_logits(plan, row), dtype=np.int64)
        for row, sequence in enumerate(plan.sequences)
        if sequence.sampling.prompt_logprobs is not None
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
