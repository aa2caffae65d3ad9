"""Token embedding and language-model head, both split over the vocabulary; tied models share one weight.

Every rank holds ceil(V / ranks) rows; the last one may hold fewer and pads with zeros, which the gather cuts off.
Shape suffixes: T tokens, n rows asked for, C hidden features, V vocabulary, R vocabulary rows of a rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.linear import LinearWeight
from kvferry_engine.layers.weights import Slots, WeightSlot


class VocabEmbedding:
    """Rows of the embedding matrix."""

    def __init__(self, vocab_size: int, hidden_size: int, *, context: LayerContext) -> None:
        self._parallel = context.parallel
        self._vocab_size = vocab_size
        self._num_rows = -(-vocab_size // self._parallel.size)
        self._first = self._parallel.rank * self._num_rows
        self._weight_RC = torch.zeros(self._num_rows, hidden_size, dtype=context.dtype, device=context.device)

    def slots(self, name: str) -> Slots:
        """Checkpoint name `name.weight`."""
        weight = self._weight_RC
        shape = (self._vocab_size, weight.shape[1])
        return {f"{name}.weight": WeightSlot(shape=shape, destination=weight, start=self._first, loaded=_nothing)}

    @property
    def weight_RC(self) -> Tensor:
        """The rows of this rank, for a tied head."""
        return self._weight_RC

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return [T, C], equal on every rank. Ids must be within the vocabulary."""
        if self._parallel.size == 1:
            return F.embedding(token_ids_T, self._weight_RC)
        local_T = token_ids_T - self._first
        outside_T = (local_T < 0) | (local_T >= self._num_rows)
        hidden_TC = F.embedding(local_T.masked_fill(outside_T, 0), self._weight_RC)
        hidden_TC.masked_fill_(outside_T[:, None], 0)
        return self._parallel.all_reduce(hidden_TC)


class LanguageModelHead:
    """Logits over the whole vocabulary, gathered on rank 0."""

    def __init__(self, vocab_size: int, hidden_size: int, *, context: LayerContext) -> None:
        self._parallel = context.parallel
        self._vocab_size = vocab_size
        num_rows = -(-vocab_size // self._parallel.size)
        self._first = self._parallel.rank * num_rows
        self._weight = LinearWeight(num_rows, hidden_size, bias=False, num_pending=1, context=context)

    def slots(self, name: str) -> Slots:
        """Checkpoint name `name.weight` of an untied head."""
        weight = self._weight
        weight.plain.zero_()
        shape = (self._vocab_size, weight.plain.shape[1])
        return {
            f"{name}.weight": WeightSlot(shape=shape, destination=weight.plain, start=self._first, loaded=weight.loaded)
        }

    def tie(self, weight_RC: Tensor) -> None:
        """Use a loaded embedding's rows; on a GPU without a copy of them."""
        self._weight.plain = weight_RC
        self._weight.loaded()

    def __call__(self, hidden_nC: Tensor) -> Tensor | None:
        """Return fp32 logits [n, V] on rank 0, None on the other ranks. Blocks for the other ranks."""
        logits = self._parallel.gather_last(self._weight.apply(hidden_nC))
        return None if logits is None else logits[:, : self._vocab_size].float()


def _nothing() -> None:
    """An embedding needs no work after loading."""
