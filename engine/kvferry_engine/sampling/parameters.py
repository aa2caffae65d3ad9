"""The sampling parameters of the rows of a step as tensors, made once and kept while the same sequences are sampled together.

Only what at least one row asks for gets a tensor; everything else is None and costs nothing in the sampler. Shape suffixes:
n rows, m rows that use a feature, e entries (row, id), w banned words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.request import Sequence
from kvferry_engine.wire.messages import Sampling

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
LOGIT_BIAS_LIMIT = 100.0
ANY_ID = -1
"""Matches every token in a prefix of a banned word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Values for single logits: rows_e, ids_e int64, values_e fp32."""

    rows_e: Tensor
    ids_e: Tensor
    values_e: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Rows with an allow-list: rows_m int64, keep_mV bool."""

    rows_m: Tensor
    keep_mV: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MinTokens:
    """Ids masked while a row's position is below until_e: rows_e, ids_e, until_e int64; the same by row for the CPU."""

    rows_e: Tensor
    ids_e: Tensor
    until_e: Tensor
    until_by_row: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Rows with penalties: rows_m int64, the others fp32 [m]."""

    rows: list[int]
    rows_m: Tensor
    presence_m: Tensor
    frequency_m: Tensor
    repetition_m: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """Banned words: word i bans last_w[i] in row rows_w[i] when the output ends with prefix_wl[i] (padded with ANY_ID)."""

    rows: list[int]
    """Rows with banned words, in order."""
    indices_w: Tensor
    """Index into `rows` of each word."""
    rows_w: Tensor
    prefix_wl: Tensor
    last_w: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Rows with top-k, top-p or min-p: rows_m int64 or None for all; top_k_m int32, top_p_m and min_p_m fp32."""

    rows_m: Tensor | None
    top_k_m: Tensor
    top_p_m: Tensor
    min_p_m: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParameters:
    """Parameters of n rows. `random_rows_m` are the rows that draw, None when all do; empty when all are greedy."""

    sequences: list[Sequence]
    num_random: int
    random_rows_m: Tensor | None
    seeds_m: Tensor
    temperatures_m: Tensor
    truncation: Truncation | None
    allowed: Allowed | None
    bias: Entries | None
    min_tokens: MinTokens | None
    penalties: Penalties | None
    bad_words: BadWords | None
    logprob_rows: list[int]

    @property
    def changes_logits(self) -> bool:
        """True when logits differ from the model's before the choice (temperature and truncation aside)."""
        parts = (self.allowed, self.bias, self.min_tokens, self.penalties, self.bad_words)
        return any(part is not None for part in parts)

    def are_for(self, sequences: list[Sequence]) -> bool:
        """True when these are the parameters of exactly these sequences."""
        return len(sequences) == len(self.sequences) and all(
            ours is theirs for ours, theirs in zip(self.sequences, sequences, strict=True)
        )


def make_parameters(sequences: list[Sequence], *, vocab_size: int, device: torch.device) -> RowParameters:
    """Return the parameters of the sequences sampled together, in row order."""
    make = _Tensors(device)
    samplings = [sequence.sampling for sequence in sequences]
    random_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_BELOW]
    is_mixed = len(random_rows) < len(sequences)
    return RowParameters(
        sequences=list(sequences),
        num_random=len(random_rows),
        random_rows_m=make.int64(random_rows) if is_mixed else None,
        seeds_m=make.int64(signed64(sequences[row].seed) for row in random_rows),
        temperatures_m=make.fp32(max(samplings[row].temperature, LOWEST_TEMPERATURE) for row in random_rows),
        truncation=_truncation([samplings[row] for row in random_rows], vocab_size, make),
        allowed=_allowed(samplings, vocab_size, make),
        bias=_bias(samplings, make),
        min_tokens=_min_tokens(sequences, make),
        penalties=_penalties(samplings, make),
        bad_words=_bad_words(samplings, make),
        logprob_rows=[row for row, sampling in enumerate(samplings) if wants_logprobs(sampling)],
    )


def wants_logprobs(sampling: Sampling) -> bool:
    """True when figures are reported with each token."""
    return sampling.logprobs is not None or sampling.logprob_token_ids is not None


def has_penalties(sampling: Sampling) -> bool:
    """True when earlier tokens change the logits."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


def signed64(value: int) -> int:
    """Return any integer modulo 2**64 as the int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class _Tensors:
    """Makes tensors on one device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def int64(self, values: Iterable[int]) -> Tensor:
        return self._upload(torch.tensor(list(values), dtype=torch.int64))

    def int32(self, values: Iterable[int]) -> Tensor:
        return self._upload(torch.tensor(list(values), dtype=torch.int32))

    def fp32(self, values: Iterable[float]) -> Tensor:
        return self._upload(torch.tensor(list(values), dtype=torch.float32))

    def _upload(self, tensor: Tensor) -> Tensor:
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def _truncation(samplings: list[Sampling], vocab_size: int, make: _Tensors) -> Truncation | None:
    """`samplings` of the rows that draw; rows of the result count among those."""

    def truncates(sampling: Sampling) -> bool:
        return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0

    rows = [row for row, sampling in enumerate(samplings) if truncates(sampling)]
    if not rows:
        return None
    chosen = [samplings[row] for row in rows]
    return Truncation(
        rows_m=None if len(rows) == len(samplings) else make.int64(rows),
        top_k_m=make.int32(max(min(sampling.top_k, vocab_size), 0) for sampling in chosen),
        top_p_m=make.fp32(sampling.top_p for sampling in chosen),
        min_p_m=make.fp32(sampling.min_p for sampling in chosen),
    )


def _allowed(samplings: list[Sampling], vocab_size: int, make: _Tensors) -> Allowed | None:
    lists = {row: sampling.allowed_token_ids for row, sampling in enumerate(samplings)}
    given = [(row, ids) for row, ids in lists.items() if ids is not None]
    if not given:
        return None
    keep = torch.zeros((len(given), vocab_size), dtype=torch.bool, device=make.device)
    indices = make.int64(index for index, (_, ids) in enumerate(given) for _ in ids)
    keep[indices, make.int64(token_id for _, ids in given for token_id in ids)] = True
    return Allowed(rows_m=make.int64(row for row, _ in given), keep_mV=keep)


def _bias(samplings: list[Sampling], make: _Tensors) -> Entries | None:
    entries = [
        (row, token_id, min(max(value, -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT))
        for row, sampling in enumerate(samplings)
        for token_id, value in (sampling.logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return Entries(rows_e=make.int64(rows), ids_e=make.int64(ids), values_e=make.fp32(values))


def _min_tokens(sequences: list[Sequence], make: _Tensors) -> MinTokens | None:
    entries: list[tuple[int, int, int]] = []
    until_by_row: dict[int, int] = {}
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        until = sequence.num_prompt + sampling.min_tokens
        masked = {*sampling.eos_token_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        entries += [(row, token_id, until) for token_id in sorted(masked)]
        if masked:
            until_by_row[row] = until
    if not entries:
        return None
    rows, ids, untils = zip(*entries, strict=True)
    return MinTokens(
        rows_e=make.int64(rows), ids_e=make.int64(ids), until_e=make.int64(untils), until_by_row=until_by_row
    )


def _penalties(samplings: list[Sampling], make: _Tensors) -> Penalties | None:
    rows = [row for row, sampling in enumerate(samplings) if has_penalties(sampling)]
    if not rows:
        return None
    chosen = [samplings[row] for row in rows]
    return Penalties(
        rows=rows,
        rows_m=make.int64(rows),
        presence_m=make.fp32(sampling.presence_penalty for sampling in chosen),
        frequency_m=make.fp32(sampling.frequency_penalty for sampling in chosen),
        repetition_m=make.fp32(sampling.repetition_penalty for sampling in chosen),
    )


def _bad_words(samplings: list[Sampling], make: _Tensors) -> BadWords | None:
    rows = [row for row, sampling in enumerate(samplings) if sampling.bad_words]
    words = [(index, word) for index, row in enumerate(rows) for word in samplings[row].bad_words or () if word]
    if not words:
        return None
    longest = max(len(word) for _, word in words) - 1
    padded = [[ANY_ID] * (longest + 1 - len(word)) + list(word[:-1]) for _, word in words]
    return BadWords(
        rows=rows,
        indices_w=make.int64(index for index, _ in words),
        rows_w=make.int64(rows[index] for index, _ in words),
        prefix_wl=make.int64(token_id for prefix in padded for token_id in prefix).view(len(words), longest),
        last_w=make.int64(word[-1] for _, word in words),
    )
