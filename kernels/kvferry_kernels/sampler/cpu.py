"""Sampling on CPUs without sorting vocabularies and, mostly, without a random number per id; draws by the C++ extension.

Rows are looked at as segments: a maximum per segment costs a vectorised pass, and tells exactly which few segments can hold
the largest ids, the k best ids, or an id that a Gumbel number could still lift to the top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels import extension
from kvferry_kernels.sampler.reference import apply_penalties, gumbel, row_keys

__all__ = ["apply_penalties", "greedy", "gumbel_argmax", "top_k_top_p_min_p"]

SEGMENT = 64
# Largest Gumbel number of 23-bit uniforms, -log(-log(1 - 2**-24)), and room for the rounding of fp32 logits.
GUMBEL_BOUND = 16.6356 + 0.1
# A row whose candidate segments are more than one in this many is drawn without picking candidates.
DENSE_SHARE = 2
# Size of the sorted head of a distribution that top-p tries before it looks at the rest.
NUCLEUS_HEAD = 128


def greedy(logits: Tensor) -> Tensor:
    """See `sampler.greedy`."""
    segments = _segments(logits)
    best_segment = segments.amax(-1).argmax(-1)
    within = segments[torch.arange(logits.shape[0]), best_segment].argmax(-1)
    return best_segment * SEGMENT + within


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `sampler.gumbel_argmax`."""
    batch, vocab_size = logits.shape
    if logits.stride(1) == 1 and extension.is_available():
        ids = torch.empty(batch, dtype=torch.int64)
        torch.ops.kvferry.gumbel_argmax(ids, logits, seeds, positions)
        return ids
    keys = row_keys(seeds, positions)
    segments = _segments(logits)
    maxima = segments.amax(-1)
    best_segment = maxima.argmax(-1)
    best_ids = best_segment * SEGMENT + segments[torch.arange(batch), best_segment].argmax(-1)
    # The likeliest id's score bounds which other ids are worth a random number.
    thresholds = maxima.amax(-1) + gumbel(keys, best_ids) - GUMBEL_BOUND
    candidates = maxima >= thresholds[:, None]
    is_dense = candidates.sum(1) * DENSE_SHARE > maxima.shape[1]
    candidates &= ~is_dense[:, None]
    drawn = _draw_candidates(segments, candidates, thresholds, keys)
    for row in is_dense.nonzero().squeeze(1).tolist():
        drawn[row] = (logits[row] + gumbel(keys[row], torch.arange(vocab_size))).argmax()
    return drawn


def _draw_candidates(segments: Tensor, candidates: Tensor, thresholds: Tensor, keys: Tensor) -> Tensor:
    """Draw from the values above their row's threshold in candidate segments [B, n] of all rows at once, ids [B] int64."""
    batch, last_id = candidates.shape[0], candidates.shape[1] * SEGMENT
    rows, segment_ids = candidates.nonzero(as_tuple=True)
    values = segments[rows, segment_ids]
    picked, within = (values >= thresholds[rows][:, None]).nonzero(as_tuple=True)
    rows, ids = rows[picked], segment_ids[picked] * SEGMENT + within
    scores = values[picked, within] + gumbel(keys[rows], ids)
    best = torch.full((batch,), float("-inf")).scatter_reduce_(0, rows, scores, "amax")
    ids = torch.where(scores == best[rows], ids, last_id)
    return torch.full((batch,), last_id).scatter_reduce_(0, rows, ids, "amin")


def top_k_top_p_min_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """See `sampler.top_k_top_p_min_p`."""
    vocab_size = logits.shape[1]
    segments = _segments(logits)
    maxima = segments.amax(-1)
    tops = maxima.amax(-1)
    thresholds = torch.where(min_p > 0, tops + min_p.log(), float("-inf"))
    for row, (k, p) in enumerate(zip(top_k.tolist(), top_p.tolist(), strict=True)):
        if 0 < k < vocab_size:
            head = _largest(segments[row], maxima[row], k)
            thresholds[row] = torch.maximum(thresholds[row], head[k - 1])
        if p < 1:
            nucleus = _nucleus(segments[row], maxima[row], thresholds[row], p)
            thresholds[row] = torch.maximum(thresholds[row], nucleus)
    logits.masked_fill_(logits < thresholds[:, None], float("-inf"))


def _segments(logits: Tensor) -> Tensor:
    """Return logits [B, V] as [B, n, SEGMENT], padded with -inf."""
    missing = -logits.shape[1] % SEGMENT
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits.view(logits.shape[0], logits.shape[1] // SEGMENT, SEGMENT)


def _largest(segments: Tensor, maxima: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of segments [n, SEGMENT], sorted downwards.

    The segments of the `count` largest maxima hold them.
    """
    if count < maxima.numel():
        segments = segments[maxima.topk(count, sorted=False).indices]
    return segments.reshape(-1).topk(count).values


def _at_least(segments: Tensor, maxima: Tensor, threshold: Tensor) -> Tensor:
    """Return the values of segments [n, SEGMENT] that are at least `threshold`; all, finite or not, where that is -inf."""
    if threshold == float("-inf"):
        return segments.reshape(-1)
    values = segments[maxima >= threshold]
    return values[values >= threshold]


def _nucleus(segments: Tensor, maxima: Tensor, threshold: Tensor, p: float) -> Tensor:
    """Return the largest value, at least `threshold`, so that it and all above hold the share p of the mass from there on."""
    top = maxima.amax()
    values = _at_least(segments, maxima, threshold)
    wanted = _mass(values, top) * p
    if values.numel() > NUCLEUS_HEAD:
        head = _largest(segments, maxima, NUCLEUS_HEAD)
        if _mass(head, top) >= wanted:
            return _first_reaching(head, top, wanted)
    # Quickselect by mass: keep the half in which the running mass passes what is wanted, until little is left to sort.
    while values.numel() > NUCLEUS_HEAD:
        pivot = values.mean()
        upper = values[values > pivot]
        if upper.numel() in (0, values.numel()):
            break
        mass = _mass(upper, top)
        if mass >= wanted:
            values = upper
        else:
            wanted = wanted - mass
            values = values[values <= pivot]
    return _first_reaching(values.sort(descending=True).values, top, wanted)


def _mass(values: Tensor, top: Tensor) -> Tensor:
    """Return the sum of exp(values - top) in double precision."""
    return (values - top).exp_().sum(dtype=torch.float64)


def _first_reaching(descending: Tensor, top: Tensor, wanted: Tensor) -> Tensor:
    """Return the first of the sorted values at which the running mass reaches `wanted`, the last where rounding leaves a gap."""
    reached = (descending - top).exp_().cumsum(0, dtype=torch.float64) >= wanted
    return descending[reached.int().argmax()] if reached[-1] else descending[-1]
