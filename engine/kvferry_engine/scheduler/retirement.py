"""Takes in what a step computed: tokens, newly full blocks and finish reasons, for rows whose sequence still lives.

Results for an earlier life of a slot (the sequence was preempted, aborted or had ended) are dropped here and nowhere else.
"""

from __future__ import annotations

import numpy as np

from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.scheduler.blocks import SequenceBlocks
from kvferry_engine.scheduler.finish import finish_of
from kvferry_engine.scheduler.plan import SequenceUpdate, StepResult
from kvferry_engine.scheduler.planning import Flight
from kvferry_engine.scheduler.rows import RunningRows, Slots
from kvferry_engine.wire.messages import Finish, FinishReason


def show_placeholders(flight: Flight, rows: RunningRows) -> None:
    """Count the tokens this step samples as placeholders: another step is planned before it retires."""
    if flight.shows_placeholders:
        return
    flight.shows_placeholders = True
    for row in np.flatnonzero((rows.serial[flight.slots] == flight.serials) & flight.plan.samples).tolist():
        flight.plan.sequences[row].num_placeholders += 1


def take_results(
    flight: Flight, result: StepResult, rows: RunningRows, blocks: SequenceBlocks, now: float
) -> list[SequenceUpdate]:
    """Record a retired step in the sequences and rows; updates with `finish` name sequences the caller must end."""
    plan = flight.plan
    for sequence in plan.sequences:
        sequence.num_inflight -= 1
    is_alive = rows.serial[flight.slots] == flight.serials
    updates = {}
    if result.errors:
        for row in [row for row in result.errors if is_alive[row]]:
            is_alive[row] = False
            failed = plan.sequences[row]
            finish = Finish(reason=FinishReason.ERROR, message=result.errors[row])
            updates[row] = SequenceUpdate(
                sequence=failed, token_ids=[], offset=failed.num_output, finish=finish, num_computed=failed.num_computed
            )
    live = np.flatnonzero(is_alive)
    _record_computed(flight, live, rows, blocks)
    updates.update(_prefill_updates(flight, live[~plan.samples[live]]))
    updates.update(_sampled_updates(flight, live[plan.samples[live]], result, rows, now))
    if result.prompt_logprobs:
        _add_prompt_logprobs(flight, set(live.tolist()), result, updates)
    return list(updates.values())


def _record_computed(flight: Flight, live: Slots, rows: RunningRows, blocks: SequenceBlocks) -> None:
    plan = flight.plan
    slots = flight.slots[live]
    ends = plan.starts[live] + plan.counts[live]
    sequences = plan.sequences
    for row, end in zip(live.tolist(), ends.tolist(), strict=True):
        sequences[row].num_computed = end
    is_full = ends // blocks.block_size > rows.num_indexed[slots]
    for row, slot in zip(live[is_full].tolist(), slots[is_full].tolist(), strict=True):
        blocks.index_full(sequences[row])
        rows.num_indexed[slot] = sequences[row].num_indexed


def _prefill_updates(flight: Flight, live: Slots) -> dict[int, SequenceUpdate]:
    updates = {}
    for row in live.tolist():
        sequence = flight.plan.sequences[row]
        if sequence.purpose is not Purpose.PREFILL:
            continue
        sequence.tokens_since_preemption += int(flight.plan.counts[row])
        finish = Finish(reason=FinishReason.STOP) if sequence.num_computed >= sequence.upto else None
        updates[row] = SequenceUpdate(
            sequence=sequence, token_ids=[], offset=0, finish=finish, num_computed=sequence.num_computed
        )
    return updates


def _sampled_updates(
    flight: Flight, live: Slots, result: StepResult, rows: RunningRows, now: float
) -> dict[int, SequenceUpdate]:
    plan = flight.plan
    slots = flight.slots[live]
    token_ids = result.token_ids[live].astype(np.int32)
    may_finish = rows.may_finish(slots, token_ids).tolist()
    rows.learn(slots, token_ids)
    updates = {}
    for row, token, might in zip(live.tolist(), token_ids.tolist(), may_finish, strict=True):
        sequence = plan.sequences[row]
        position = sequence.num_tokens
        sequence.tokens[position] = token
        sequence.num_tokens = position + 1
        if sequence.num_preemptions:
            sequence.tokens_since_preemption += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if flight.shows_placeholders:
            sequence.num_placeholders -= 1
        updates[row] = SequenceUpdate(
            sequence=sequence,
            token_ids=[token],
            offset=position - sequence.num_prompt,
            finish=finish_of(sequence, int(rows.limit[sequence.slot])) if might else None,
            num_computed=sequence.num_computed,
        )
    if result.logprobs:
        for row, logprobs in result.logprobs.items():
            if row in updates:
                updates[row].logprobs = [logprobs]
    return updates


def _add_prompt_logprobs(
    flight: Flight, live: set[int], result: StepResult, updates: dict[int, SequenceUpdate]
) -> None:
    """Report each prompt position once, however often preemption made the prompt be computed again."""
    for row, entries in result.prompt_logprobs.items():
        if row not in live:
            continue
        sequence: Sequence = flight.plan.sequences[row]
        known = max(sequence.num_prompt_logprobs - int(flight.plan.starts[row]), 0)
        news = entries[known:]
        if not news:
            continue
        sequence.num_prompt_logprobs += len(news)
        if row not in updates:
            updates[row] = SequenceUpdate(
                sequence=sequence, token_ids=[], offset=sequence.num_output, num_computed=sequence.num_computed
            )
        updates[row].prompt_logprobs = news
