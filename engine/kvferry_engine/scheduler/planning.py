"""Turns chosen rows into a step plan: a few array operations for the decode rows, one slice per prefill chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry_engine.scheduler.plan import StepPlan
from kvferry_engine.scheduler.rows import NEVER, RunningRows, Slots


@dataclass(slots=True)
class Flight:
    """What the scheduler remembers of a launched step: the rows' slots and who lived there (`RunningRows.serial`)."""

    plan: StepPlan
    slots: Slots
    serials: npt.NDArray[np.int64]
    shows_placeholders: bool = False
    """The sampled tokens are counted in `Sequence.num_placeholders` (a later step was planned before this one retired)."""


def build_plan(number: int, rows: RunningRows, decode_slots: Slots, chunks: list[tuple[int, int]]) -> Flight:
    """Return step `number` and advance the rows past it.

    `decode_slots` [decodes]; `chunks` (slot, token count) of prefill rows. A sequence that restarts with everything but
    its last output token cached is a decode row too.
    """
    restarted = [slot for slot, _ in chunks if rows.is_decodable(slot)]
    if restarted:
        decode_slots = np.concatenate([decode_slots, np.asarray(restarted, dtype=np.intp)])
        chunks = [(slot, count) for slot, count in chunks if slot not in restarted]
    num_decodes = len(decode_slots)
    chunk_slots = np.asarray([slot for slot, _ in chunks], dtype=np.intp)
    slots = np.concatenate([decode_slots, chunk_slots]) if chunks else decode_slots
    starts = rows.planned[slots]
    counts = np.ones(len(slots), dtype=np.int32)
    counts[num_decodes:] = [count for _, count in chunks]
    samples = (starts + counts == rows.total[slots]) & (rows.limit[slots] != NEVER)
    sequences = rows.sequences_at(slots)
    token_ids = rows.last_token[decode_slots]
    if chunks:
        pieces = [
            sequence.ids(start, start + count)
            for sequence, start, count in zip(
                sequences[num_decodes:], starts[num_decodes:].tolist(), counts[num_decodes:].tolist(), strict=True
            )
        ]
        token_ids = np.concatenate([token_ids, *pieces])
    width = rows.num_blocks[slots].max()
    plan = StepPlan(
        number=number,
        sequences=sequences,
        starts=starts,
        counts=counts,
        samples=samples,
        token_ids=token_ids,
        block_tables=rows.tables[slots, :width],
        generations=rows.generation[slots],
        num_decode_rows=num_decodes,
        slots=slots.astype(np.int32),
    )
    rows.advance(slots, counts, samples)
    for sequence in sequences:
        sequence.num_inflight += 1
    return Flight(plan=plan, slots=slots, serials=rows.serial[slots])
