"""The sampling steps as their definitions say, with full sorts and one draw per id."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_kernels.sampler import random_numbers as rn


def greedy(logits: Tensor) -> Tensor:
    """See `sampler.greedy`."""
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)


def mix64(value: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser of int64 numbers; int64 shifts are arithmetic, so the sign bits are masked off."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * rn.signed(rn.MIX_A)
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * rn.signed(rn.MIX_B)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the key of each sampled position, int64 [B]."""
    return mix64(seeds + (positions + 1) * rn.signed(rn.K1))


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the fp32 uniform numbers in (0, 1) of int64 keys and token ids, broadcast against each other."""
    bits = (mix64(keys + token_ids * rn.signed(rn.K2)) >> rn.UNIFORM_SHIFT) & ((1 << 23) - 1)
    return (bits.float() + 0.5) * rn.UNIFORM_SCALE


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the fp32 Gumbel numbers -log(-log(u)) of keys and token ids."""
    return -torch.log(-torch.log(uniform(keys, token_ids)))


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `sampler.gumbel_argmax`."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    return greedy(logits + gumbel(row_keys(seeds, positions)[:, None], ids))


def apply_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """See `sampler.apply_penalties`."""
    factor = torch.where(prompt_mask | (output_counts > 0), repetition[:, None], 1.0)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    penalised -= frequency[:, None] * output_counts
    penalised -= presence[:, None] * (output_counts > 0)
    logits.copy_(penalised)


def top_k_top_p_min_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """See `sampler.top_k_top_p_min_p`."""
    for row, k, p, floor in zip(logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if floor > 0:
            row[row < row.max() + torch.tensor(floor).log()] = float("-inf")
        if 0 < k < row.numel():
            row[row < row.sort(descending=True).values[k - 1]] = float("-inf")
        if p < 1:
            probabilities = torch.softmax(row.double(), -1)
            likelier = ((row[None, :] > row[:, None]) * probabilities).sum(1)
            row[(likelier >= p) & (row < row.max())] = float("-inf")
