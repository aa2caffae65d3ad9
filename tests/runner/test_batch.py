"""A plan becomes flat arrays, and the arrays survive the trip to another rank."""

from __future__ import annotations

import dataclasses

import numpy as np

from kit.steps import Blocks, make_plan, make_sequence
from kvferry_engine.runner.batch import ForwardBatch, from_message, make_batch, to_message
from kvferry_engine.runner.rank_messages import RunBatch, decode_to_rank, encode
from kvferry_engine.scheduler.plan import PLACEHOLDER, StepPlan

BLOCK_SIZE = 16


def mixed_plan() -> StepPlan:
    """A decode at position 20 (its token still on the device), a whole prompt of 3, the middle of a prompt of 50."""
    decode = make_sequence(1, range(20), 8)
    decode.num_computed, decode.num_tokens = 20, 21
    decode.tokens[20] = PLACEHOLDER
    short = make_sequence(2, [7, 8, 9], 8, prompt_logprobs=1)
    middle = make_sequence(3, range(100, 150), 8, prompt_logprobs=0)
    middle.num_computed = 30
    return make_plan(5, [(short, 3), (middle, 10), (decode, 1)], Blocks(16, BLOCK_SIZE))


def make() -> tuple[StepPlan, ForwardBatch]:
    plan = mixed_plan()
    return plan, make_batch(plan, block_size=BLOCK_SIZE, previous_rows={1: 4})


def test_positions_continue_where_each_row_stopped() -> None:
    _, batch = make()

    assert batch.positions.tolist() == [20, 0, 1, 2, *range(30, 40)]
    assert batch.query_starts.tolist() == [0, 1, 4, 14]
    assert batch.seq_lens.tolist() == [21, 3, 40]
    assert (batch.num_decode_rows, batch.max_query_len) == (1, 10)


def test_slots_follow_the_block_table() -> None:
    plan, batch = make()

    rows = [0, 1, 1, 1] + [2] * 10
    for token, row in enumerate(rows):
        block, offset = divmod(int(batch.positions[token]), BLOCK_SIZE)
        assert batch.slots[token] == plan.sequences[row].blocks[block] * BLOCK_SIZE + offset


def test_only_rows_that_reach_the_end_are_sampled() -> None:
    _, batch = make()

    assert batch.sample_indices.tolist() == [0, 3]


def test_prompt_logits_are_those_with_a_following_prompt_token() -> None:
    _, batch = make()

    assert batch.prompt_indices.tolist() == [1, 2, *range(4, 14)]


def test_tokens_on_the_device_name_their_source() -> None:
    _, batch = make()

    assert batch.carry_to.tolist() == [0]
    assert batch.carry_from.tolist() == [4]


def test_a_batch_survives_the_wire() -> None:
    _, batch = make()

    message = decode_to_rank(encode(RunBatch(to_message(batch))))
    assert isinstance(message, RunBatch)
    copy = from_message(message.batch)

    for field in dataclasses.fields(ForwardBatch):
        ours, theirs = getattr(batch, field.name), getattr(copy, field.name)
        np.testing.assert_array_equal(ours, theirs)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
