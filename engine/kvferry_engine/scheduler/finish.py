"""Decides when a sequence ends: one order of rules for sampled, resumed and capacity-bound sequences alike."""

from __future__ import annotations

import numpy as np

from kvferry_engine.request import Int32, Sequence
from kvferry_engine.wire.messages import Finish, FinishReason, RepetitionDetection

REPETITION_STOP_REASON = "repetition_detected"


def finish_of(sequence: Sequence, limit: int) -> Finish | None:
    """Return why the sequence is over after its last known token, or None to go on (`limit`: `Limits.length`).

    Order: EOS id, stop token id, length, repetition. Before `min_tokens` only the length ends a sequence. A sequence without
    output can only be at its limit already.
    """
    sampling = sequence.sampling
    may_stop = sequence.num_output > 0 and sequence.num_output >= sampling.min_tokens
    if may_stop:
        last = int(sequence.tokens[sequence.num_tokens - 1])
        if last in sampling.eos_token_ids:
            return Finish(reason=FinishReason.STOP)
        if last in sampling.stop_token_ids:
            return Finish(reason=FinishReason.STOP, stop_reason=last)
    if sequence.num_tokens >= limit:
        return Finish(reason=FinishReason.LENGTH)
    if may_stop and sampling.repetition_detection is not None:
        output = sequence.ids(sequence.num_prompt, sequence.num_tokens)
        if ends_in_repetition(output, sampling.repetition_detection):
            return Finish(reason=FinishReason.REPETITION, stop_reason=REPETITION_STOP_REASON)
    return None


def ends_in_repetition(output: Int32, detection: RepetitionDetection) -> bool:
    """True when `output` [tokens] ends with `min_count` copies of one pattern of an allowed size.

    A `max_pattern_size` of 0 or a `min_count` below 2 switches the rule off.
    """
    count = detection.min_count
    if detection.max_pattern_size < 1 or count < 2:
        return False
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        if size * count > len(output):
            return False
        copies = output[len(output) - size * count :].reshape(count, size)
        if np.array_equal(copies[1:], copies[:-1]):
            return True
    return False
