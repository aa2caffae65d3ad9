"""Hand-made step plans: drives a `ModelRunner` without the scheduler, in odd chunks and mixed batches.

Blocks are handed out in a shuffled order, so that a kernel that confuses logical and physical blocks fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np

from kvferry_engine.request import Sequence
from kvferry_engine.scheduler.plan import StepPlan, StepResult
from kvferry_engine.wire.messages import Sampling


class GreedySampler:
    """Argmax of every row."""

    def sample(self, logits: Any, sequences: list[Sequence], positions: list[int]) -> tuple[Any, dict[int, Any]]:
        return logits.argmax(-1), {}

    def forget(self, handles: list[int]) -> None:
        return


def make_sequence(handle: int, prompt: Items[int], max_tokens: int, **sampling: Any) -> Sequence:
    """A sequence with room for its output."""
    tokens = np.zeros(len(prompt) + max_tokens + 1, dtype=np.int32)
    tokens[: len(prompt)] = prompt
    return Sequence(
        rid=f"r{handle}",
        index=0,
        handle=handle,
        tokens=tokens,
        num_prompt=len(prompt),
        num_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, **sampling),
        seed=handle,
        root=b"",
    )


class Blocks:
    """Block ids in a shuffled order, never returned."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for so many tokens."""
        while len(sequence.blocks) * self.block_size < num_tokens:
            sequence.blocks.append(self._free.pop())


def make_plan(number: int, work: list[tuple[Sequence, int]], blocks: Blocks) -> StepPlan:
    """A plan that computes the next `count` tokens of each sequence; decode rows are sorted to the front."""

    def is_decode(item: tuple[Sequence, int]) -> bool:
        sequence, count = item
        return count == 1 and sequence.num_computed >= sequence.num_prompt

    work = sorted(work, key=lambda item: not is_decode(item))
    for sequence, count in work:
        blocks.grow(sequence, sequence.num_computed + count)
    width = max(len(sequence.blocks) for sequence, _ in work)
    tables = np.zeros((len(work), width), dtype=np.int32)
    for row, (sequence, _) in enumerate(work):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    starts = np.array([sequence.num_computed for sequence, _ in work], dtype=np.int32)
    counts = np.array([count for _, count in work], dtype=np.int32)
    totals = np.array([sequence.num_tokens for sequence, _ in work], dtype=np.int32)
    return StepPlan(
        number=number,
        sequences=[sequence for sequence, _ in work],
        starts=starts,
        counts=counts,
        samples=starts + counts == totals,
        token_ids=np.concatenate([s.ids(s.num_computed, s.num_computed + count) for s, count in work]),
        block_tables=tables,
        generations=np.zeros(len(work), dtype=np.int64),
        num_decode_rows=sum(map(is_decode, work)),
    )


def retire(plan: StepPlan, result: StepResult) -> None:
    """Append what a step sampled."""
    for row, sequence in enumerate(plan.sequences):
        sequence.num_computed += int(plan.counts[row])
        if plan.samples[row]:
            sequence.tokens[sequence.num_tokens] = result.token_ids[row]
            sequence.num_tokens += 1


def generate(
    runner: Any, sequences: list[Sequence], *, blocks: Blocks, chunks: Items[int] = (7, 3, 13, 1, 32), max_rows: int = 8
) -> list[list[int]]:
    """Run all sequences to max_tokens; sequence i starts at step 2 i, so that chunks of prompts meet decodes. Returns outputs."""
    chunk_number = 0
    for number in range(100_000):
        work: list[tuple[Sequence, int]] = []
        for index, sequence in enumerate(sequences):
            left = sequence.num_tokens - sequence.num_computed
            is_done = sequence.num_output >= sequence.sampling.max_tokens
            if is_done or number < 2 * index or len(work) == max_rows:
                continue
            if left > 1 or sequence.num_computed < sequence.num_prompt:
                work.append((sequence, min(left, chunks[chunk_number % len(chunks)])))
                chunk_number += 1
            else:
                work.append((sequence, 1))
        if work:
            plan = make_plan(number, work, blocks)
            runner.launch(plan)
            retire(plan, runner.collect())
        elif number >= 2 * len(sequences):
            break
    return [s.ids(s.num_prompt, s.num_prompt + s.sampling.max_tokens).tolist() for s in sequences]


def weights_of(path: Path) -> list[tuple[str, Any]]:
    """All tensors of a checkpoint's safetensors files."""
    from safetensors.torch import load_file

    return [item for file in sorted(path.glob("*.safetensors")) for item in load_file(file).items()]
