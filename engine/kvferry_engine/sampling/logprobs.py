"""Figures about tokens at one position: log-probs or logits, ranks, and the likeliest alternatives, for output and prompt alike.

All ids of a position are in one total order, larger logits first and lower ids first among equal ones, so that ranks and
alternatives are the same on every device. Shape suffixes: n positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry_engine.config import LogprobsMode
from kvferry_engine.wire.messages import TokenLogprobs
from kvferry_engine.wire.packing import pack_ids

ROWS_AT_A_TIME = 16
"""Positions looked at together: 16 x 150 000 keys of 8 bytes are 19 MB."""
LOGITS_MODES = (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)
_LOW_BITS = (1 << 32) - 1


def token_logprobs(
    logits_nV: Tensor,
    targets: Tensor | Sequence[int],
    num_alternatives: int | Sequence[int],
    *,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    further_ids: Sequence[Sequence[int]] | None = None,
) -> list[TokenLogprobs]:
    """Return per position the target first, then the best alternatives, then `further_ids`, each id once.

    logits fp32 [n, V], unchanged; targets int64 [n]; `num_alternatives` for all or per position, -1 = whole vocabulary.
    A target among the best takes one of their places. The numbers are log-softmax of the logits, in logits modes the logits
    themselves. Waits for the device.
    """
    count = logits_nV.shape[0]
    targets_n = torch.as_tensor(targets, dtype=torch.int64, device=logits_nV.device)
    widths = [num_alternatives] * count if isinstance(num_alternatives, int) else list(num_alternatives)
    further = [()] * count if further_ids is None else further_ids
    result: list[TokenLogprobs] = []
    for first in range(0, count, ROWS_AT_A_TIME):
        part = slice(first, first + ROWS_AT_A_TIME)
        result += _some(logits_nV[part], targets_n[part], widths[part], further[part], mode)
    return result


def _some(
    logits_nV: Tensor, targets_n: Tensor, widths: list[int], further: Sequence[Sequence[int]], mode: LogprobsMode
) -> list[TokenLogprobs]:
    vocab_size = logits_nV.shape[1]
    widths = [vocab_size if width < 0 else min(width, vocab_size) for width in widths]
    keys_nV = order_keys(logits_nV)
    # One gather for everything that is reported: the target, the further ids (padded with the target), the alternatives.
    num_further = max(map(len, further), default=0)
    asked_nm = targets_n[:, None].expand(-1, 1 + num_further).clone()
    for row, ids in enumerate(further):
        asked_nm[row, 1 : 1 + len(ids)] = torch.tensor(ids, dtype=torch.int64, device=asked_nm.device)
    asked_keys_nm = keys_nV.gather(1, asked_nm)
    asked_ranks_nm = torch.stack([(keys_nV > column[:, None]).sum(-1) for column in asked_keys_nm.unbind(1)], dim=1) + 1
    best_nk = vocab_size - 1 - (keys_nV.topk(max(widths), dim=-1).values & _LOW_BITS)
    values_nx = logits_nV.gather(1, torch.cat((asked_nm, best_nk), dim=1))
    if mode not in LOGITS_MODES:
        # The largest logit goes first: a difference of two large numbers would cost digits.
        largest_n1 = logits_nV.amax(-1, keepdim=True)
        values_nx = values_nx - largest_n1 - (logits_nV - largest_n1).exp_().sum(-1, keepdim=True).log()
    asked, ranks, best, values = asked_nm.tolist(), asked_ranks_nm.tolist(), best_nk.tolist(), values_nx.tolist()
    return [
        _pack(
            [*asked[row][:1], *best[row][:width], *asked[row][1 : 1 + len(ids)]],
            [*ranks[row][:1], *range(1, width + 1), *ranks[row][1 : 1 + len(ids)]],
            [*values[row][:1], *values[row][1 + num_further :][:width], *values[row][1 : 1 + len(ids)]],
        )
        for row, (width, ids) in enumerate(zip(widths, further, strict=True))
    ]


def order_keys(logits_nV: Tensor) -> Tensor:
    """Return int64 keys [n, V], all different within a row, that order ids by logit and equal logits by lower id."""
    # -0.0 + 0.0 is 0.0, so equal numbers have equal bits; bits of negative numbers run the other way.
    bits_nV = (logits_nV.float() + 0.0).view(torch.int32)
    keys_nV = (bits_nV ^ ((bits_nV >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys_nV <<= 32
    keys_nV += torch.arange(logits_nV.shape[1] - 1, -1, -1, device=logits_nV.device)
    return keys_nV


def _pack(ids: list[int], ranks: list[int], values: list[float]) -> TokenLogprobs:
    """Pack entries, of doubles the first one."""
    entries: dict[int, tuple[int, float]] = {}
    for token_id, rank, value in zip(ids, ranks, values, strict=True):
        entries.setdefault(token_id, (rank, value))
    return TokenLogprobs(
        ids=pack_ids(entries),
        values=[value for _, value in entries.values()],
        ranks=pack_ids(rank for rank, _ in entries.values()),
    )
