"""One row at a time, one rule after the other, as the reference page states them: what the sampler must equal."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from kvferry_engine.config import LogprobsMode
from kvferry_engine.request import Sequence
from kvferry_engine.wire.messages import Sampling, TokenLogprobs
from kvferry_engine.wire.packing import unpack_ids
from kvferry_engine.wire.rng import uniform

Entry = tuple[int, float, int]
"""Id, value, rank."""


def make_sequence(
    prompt: list[int], output: list[int], sampling: Sampling, *, seed: int = 0, handle: int = 1, generation: int = 0
) -> Sequence:
    """A sequence that has said `output` so far."""
    tokens = np.zeros(len(prompt) + len(output) + 64, dtype=np.int32)
    tokens[: len(prompt) + len(output)] = prompt + output
    return Sequence(
        rid=f"r{handle}",
        index=0,
        handle=handle,
        tokens=tokens,
        num_prompt=len(prompt),
        num_tokens=len(prompt) + len(output),
        sampling=sampling,
        seed=seed,
        root=b"",
        generation=generation,
    )


def append(sequence: Sequence, token: int) -> None:
    """Retire a sampled token, as the scheduler does."""
    sequence.tokens[sequence.num_tokens] = token
    sequence.num_tokens += 1


def entries(figures: TokenLogprobs) -> list[Entry]:
    """The packed figures of one position."""
    return list(zip(unpack_ids(figures.ids), figures.values, unpack_ids(figures.ranks), strict=True))


def naive_sample(
    logits: torch.Tensor, sequence: Sequence, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
) -> tuple[int, list[Entry] | None]:
    """Return the next id and, when asked for, (id, value, rank) of what is reported. logits [V] fp32, unchanged."""
    sampling = sequence.sampling
    prompt = sequence.ids(0, sequence.num_prompt).tolist()
    output = sequence.ids(sequence.num_prompt, sequence.num_tokens).tolist()
    raw = logits.clone()
    x = logits.clone()
    _constrain(x, sampling, prompt, output)
    if sampling.temperature < 1e-5:
        token = _argmax(x)
    else:
        x /= max(sampling.temperature, 0.01)
        _truncate(x, sampling)
        position = len(prompt) + len(output)
        noise = torch.tensor([uniform(sequence.seed, position, i) for i in range(len(x))], dtype=torch.float32)
        token = _argmax(x - torch.log(-torch.log(noise)))
    if sampling.logprobs is None and sampling.logprob_token_ids is None:
        return token, None
    shown = raw if mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS) else x
    return token, naive_figures(shown, token, sampling.logprobs or 0, sampling.logprob_token_ids or [], mode)


def naive_figures(logits: torch.Tensor, target: int, count: int, further: list[int], mode: LogprobsMode) -> list[Entry]:
    """(id, value, rank) of the target, the best `count` others in order, and `further`."""
    is_logits = mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)
    values = (logits if is_logits else torch.log_softmax(logits, -1)).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    rank = {token_id: place + 1 for place, token_id in enumerate(order)}
    best = order if count < 0 else order[:count]
    return [(i, values[i], rank[i]) for i in dict.fromkeys([target, *best, *further])]


def _argmax(x: torch.Tensor) -> int:
    best = float(x.max())
    return next(i for i, value in enumerate(x.tolist()) if value == best)


def _constrain(x: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> None:
    if sampling.allowed_token_ids is not None:
        for i in range(len(x)):
            if i not in sampling.allowed_token_ids:
                x[i] = -math.inf
    for i, value in (sampling.logit_bias or {}).items():
        x[i] += max(-100.0, min(100.0, value))
    if len(output) < sampling.min_tokens:
        for i in (*sampling.eos_token_ids, *sampling.stop_token_ids):
            x[i] = -math.inf
    for i in {*prompt, *output}:
        x[i] = x[i] / sampling.repetition_penalty if x[i] > 0 else x[i] * sampling.repetition_penalty
    for i, count in Counter(output).items():
        x[i] -= torch.tensor(sampling.frequency_penalty) * count
        x[i] -= sampling.presence_penalty
    for *prefix, last in sampling.bad_words or []:
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[last] = -math.inf


def _truncate(x: torch.Tensor, sampling: Sampling) -> None:
    """min-p, then the k largest, then the smallest set with mass top_p; equal logits stay or go together."""
    if sampling.min_p > 0:
        x[x < x.max() + torch.tensor(sampling.min_p).log()] = -math.inf
    if 0 < sampling.top_k < len(x):
        x[x < x.sort(descending=True).values[sampling.top_k - 1]] = -math.inf
    if sampling.top_p < 1:
        probabilities = torch.softmax(x.double(), -1).tolist()
        values = x.tolist()
        for i, value in enumerate(values):
            likelier = sum(p for p, other in zip(probabilities, values, strict=True) if other > value)
            if likelier >= torch.tensor(sampling.top_p).item():
                x[i] = -math.inf
