"""Why a sequence ends, and in which order the reasons are looked at."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry_engine.scheduler.finish import ends_in_repetition, finish_of
from kvferry_engine.scheduler.plan import StepResult
from kvferry_engine.wire.messages import Finish, FinishReason, RepetitionDetection, Sampling
from scheduler.oracle import Engine, expected_output, make_sequence

STOP = FinishReason.STOP


@pytest.mark.parametrize(
    ("sampling", "emitted", "expected"),
    [
        (Sampling(max_tokens=9, eos_token_ids=[7]), [1, 7], Finish(reason=STOP)),
        (Sampling(max_tokens=9, stop_token_ids=[7]), [1, 7], Finish(reason=STOP, stop_reason=7)),
        (Sampling(max_tokens=9, eos_token_ids=[7], stop_token_ids=[7]), [7], Finish(reason=STOP)),
        (Sampling(max_tokens=2, eos_token_ids=[7]), [1, 7], Finish(reason=STOP)),
        (Sampling(max_tokens=2), [1, 7], Finish(reason=FinishReason.LENGTH)),
        (Sampling(max_tokens=9, min_tokens=3, eos_token_ids=[7]), [1, 7], None),
        (Sampling(max_tokens=9, min_tokens=2, eos_token_ids=[7]), [1, 7], Finish(reason=STOP)),
        (Sampling(max_tokens=9), [1, 7], None),
        (
            Sampling(max_tokens=9, repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=3)),
            [5, 1, 2, 1, 2, 1, 2],
            Finish(reason=FinishReason.REPETITION, stop_reason="repetition_detected"),
        ),
        (
            Sampling(max_tokens=3, repetition_detection=RepetitionDetection(max_pattern_size=1, min_count=3)),
            [4, 4, 4],
            Finish(reason=FinishReason.LENGTH),
        ),
    ],
)
def test_finish_rules(sampling: Sampling, emitted: list[int], expected: Finish | None) -> None:
    sequence = make_sequence(1, [7, 7], sampling=sampling, emitted=emitted)

    assert finish_of(sequence, 2 + sampling.max_tokens) == expected


@pytest.mark.parametrize(
    ("output", "smallest", "largest", "count", "expected"),
    [
        ([1, 1, 1], 1, 1, 3, True),
        ([1, 1], 1, 1, 3, False),
        ([2, 1, 1, 1], 2, 3, 2, False),
        ([1, 2, 3, 1, 2, 3], 2, 3, 2, True),
        ([9, 1, 2, 3, 1, 2, 3], 1, 8, 2, True),
        ([1, 2, 3, 1, 2, 4], 1, 3, 2, False),
        ([1, 1, 1, 1], 1, 0, 2, False),
        ([1, 1, 1, 1], 1, 2, 1, False),
        ([1, 1], 0, 1, 2, True),
    ],
)
def test_repetition_is_a_pattern_of_an_allowed_size_at_the_end(
    output: list[int], smallest: int, largest: int, count: int, expected: bool
) -> None:
    detection = RepetitionDetection(min_pattern_size=smallest, max_pattern_size=largest, min_count=count)

    assert ends_in_repetition(np.asarray(output, dtype=np.int32), detection) is expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_nothing_is_computed_beyond_max_tokens(lookahead: int) -> None:
    engine = Engine(lookahead=lookahead)

    engine.run(make_sequence(1, [1, 2, 3], sampling=Sampling(max_tokens=6)))

    assert engine.runner.num_tokens == 3 + 5


def test_tokens_after_an_eos_are_dropped() -> None:
    output, _ = expected_output([1, 2, 3], Sampling(max_tokens=9))
    sampling = Sampling(max_tokens=9, eos_token_ids=[output[2]])
    expected = expected_output([1, 2, 3], sampling)
    engine = Engine(lookahead=1)

    engine.run(make_sequence(1, [1, 2, 3], sampling=sampling))

    assert (engine.outputs[1], engine.finishes[1]) == expected
    assert engine.runner.num_tokens == 3 + len(expected[0])


def test_more_stop_ids_than_a_row_keeps_are_all_seen() -> None:
    sampling = Sampling(max_tokens=60, stop_token_ids=[*range(100, 120), 4])
    engine = Engine()

    engine.run(make_sequence(1, [2], sampling=sampling))

    assert (engine.outputs[1], engine.finishes[1]) == expected_output([2], sampling)


def test_a_resumed_sequence_that_is_complete_ends_at_once() -> None:
    engine = Engine()

    update = engine.scheduler.add(make_sequence(1, [1], emitted=[4, 5], sampling=Sampling(max_tokens=2)), 0.0)

    assert update is not None
    assert (update.offset, update.token_ids, update.finish) == (2, [], Finish(reason=FinishReason.LENGTH))
    assert not engine.scheduler.has_work


def test_a_row_that_failed_ends_with_an_error_and_its_step_is_not_cached() -> None:
    engine = Engine()
    sequence = make_sequence(1, list(range(8)))
    engine.add(sequence)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None

    updates = engine.scheduler.retire(
        plan, StepResult(token_ids=np.asarray([-1]), errors={0: "logits are not finite"}), 1.0
    )

    assert [update.finish for update in updates] == [Finish(reason=FinishReason.ERROR, message="logits are not finite")]
    assert len(engine.index) == 0
    assert engine.pool.num_free == engine.pool.num_blocks
