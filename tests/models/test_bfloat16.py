"""bf16, teacher-forced on the reference's tokens: logits stay near, and where the choice differs the margin is small.

The rule: max |difference| <= tolerance, and our argmax is the reference's or the reference's margin there is at most twice
the tolerance. transformers' own sdpa and eager implementations disagree in bf16, so equal tokens cannot be asked. The
tolerance is twice what bf16 costs the reference itself (its distance from fp32 with the same weights): random weights
amplify rounding, each architecture by another factor.
"""

from __future__ import annotations

import random

import pytest
import torch
from kit.checkpoints import VOCAB_SIZE, make_checkpoint, reference_greedy, reference_logits, reference_model
from kit.models import load_model, make_runner
from kit.steps import Blocks, make_plan, make_sequence, retire

PROMPT_LENGTH, NUM_TOKENS = 21, 32


class Recorder:
    """Keeps the logits and returns the tokens it was told."""

    def __init__(self, forced: list[int]) -> None:
        self.logits: list[torch.Tensor] = []
        self._forced = iter(forced)

    def sample(self, logits: torch.Tensor, sequences: object, positions: object) -> tuple[torch.Tensor, dict[int, object]]:
        self.logits.append(logits[0].clone())
        return torch.tensor([next(self._forced)]), {}

    def forget(self, handles: list[int]) -> None:
        return


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_bf16_logits_stay_within_the_tolerance(arch: str) -> None:
    path = make_checkpoint(arch, dtype="bfloat16")
    reference = reference_model(path, "bfloat16")
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LENGTH)]
    forced = reference_greedy(reference, prompt, NUM_TOKENS)
    ids = [*prompt, *forced[:-1]]
    expected = reference_logits(reference, ids)[len(prompt) - 1 :]
    exact = reference_logits(reference_model(path, "float32"), ids)[len(prompt) - 1 :]
    tolerance = 2 * float((expected - exact).abs().max())
    recorder, blocks = Recorder(forced), Blocks(64, 16)
    runner = make_runner(load_model(path, dtype=torch.bfloat16), sampler=recorder)
    sequence = make_sequence(1, prompt, len(forced))

    for number in range(len(forced)):
        plan = make_plan(number, [(sequence, sequence.num_tokens - sequence.num_computed)], blocks)
        runner.launch(plan)
        retire(plan, runner.collect())

    logits = torch.stack(recorder.logits)
    difference = float((logits - expected).abs().max())
    best, ours = expected.max(-1).values, expected.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1)
    share = float((ours == best).float().mean())
    error = float((logits - exact).abs().max())
    print(f"{arch}: difference {difference:.3f} of {tolerance:.3f}, from fp32 {error:.3f}, same choice {share:.0%}")
    assert difference <= tolerance
    assert bool((best - ours <= 2 * tolerance).all())
