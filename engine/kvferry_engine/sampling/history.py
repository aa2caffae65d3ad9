"""What sequences said so far, on the device, for penalties and banned words.

A step may be launched before the one before it has retired, so the last token of a sequence can be known to the device only:
counts are kept up to date there from the sampled ids themselves. They are made anew from the sequence's own tokens after
preemption, on resumption, and whenever they do not fit the position asked for. Shape suffixes: s slots, m rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvferry_engine.request import Sequence

FIRST_SLOTS = 8
NOT_OUTPUT = -2
"""Stands in tails for positions before the output; equal to no token id and to no wildcard."""


@dataclass(slots=True)
class _Counted:
    """A sequence with a slot: tokens [0, position) of its life `generation` are counted."""

    sequence: Sequence
    generation: int
    position: int
    slot: int


class TokenCounts:
    """Prompt ids and output counts of the sequences that have penalties.

    A slot takes 5 bytes per vocabulary entry; slots are reused once their sequence is forgotten.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._prompt_sV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._output_sV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._counted: dict[int, _Counted] = {}

    def rows(self, sequences: list[Sequence], positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return slots [m], prompt masks bool [m, V] and output counts int32 [m, V] of tokens before the positions."""
        slots = []
        for sequence, position in zip(sequences, positions, strict=True):
            counted = self._counted.get(sequence.handle)
            if counted is None or counted.sequence is not sequence:
                counted = _Counted(sequence, -1, -1, self._take_slot() if counted is None else counted.slot)
                self._counted[sequence.handle] = counted
            if counted.generation != sequence.generation or counted.position != position:
                self._count(counted, position)
            slots.append(counted.slot)
        slots_m = torch.tensor(slots, dtype=torch.int64).to(self._device, non_blocking=True)
        return slots_m, self._prompt_sV[slots_m], self._output_sV[slots_m]

    def add(self, sequences: list[Sequence], slots_m: Tensor, ids_m: Tensor) -> None:
        """Count one sampled token per sequence; `slots_m` as `rows` returned them."""
        self._output_sV[slots_m, ids_m] += 1
        for sequence in sequences:
            self._counted[sequence.handle].position += 1

    def forget(self, handles: list[int]) -> None:
        """Give up the slots of sequences; unknown handles are ignored."""
        for handle in handles:
            counted = self._counted.pop(handle, None)
            if counted is not None:
                self._free.append(counted.slot)

    def __len__(self) -> int:
        return len(self._counted)

    def _count(self, counted: _Counted, position: int) -> None:
        sequence = counted.sequence
        assert position <= sequence.num_tokens, "tokens that only the device knows cannot be counted anew"
        start = sequence.num_prompt
        prompt = np.zeros(self._vocab_size, dtype=np.bool_)
        prompt[sequence.ids(0, start)] = True
        output = np.bincount(sequence.ids(start, max(position, start)), minlength=self._vocab_size).astype(np.int32)
        self._prompt_sV[counted.slot] = torch.from_numpy(prompt).to(self._device)
        self._output_sV[counted.slot] = torch.from_numpy(output).to(self._device)
        counted.generation, counted.position = sequence.generation, position

    def _take_slot(self) -> int:
        if not self._free:
            size = len(self._prompt_sV)
            more = max(size, FIRST_SLOTS)
            self._prompt_sV = torch.cat((self._prompt_sV, self._prompt_sV.new_zeros((more, self._vocab_size))))
            self._output_sV = torch.cat((self._output_sV, self._output_sV.new_zeros((more, self._vocab_size))))
            self._free = list(range(size + more - 1, size - 1, -1))
        return self._free.pop()


class LastSampled:
    """The ids of the latest sampled step, for sequences whose last token the CPU does not know yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids: Tensor | None = None
        self._places: dict[int, tuple[int, int]] = {}

    def remember(self, sequences: list[Sequence], positions: list[int], ids_n: Tensor) -> None:
        """Keep the sampled ids [n] of a step."""
        self._ids = ids_n
        self._places = {
            sequence.handle: (position, row)
            for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
        }

    def tails(self, sequences: list[Sequence], positions: list[int], length: int) -> Tensor:
        """Return the last `length` output ids before each position, int64 [m, length], NOT_OUTPUT where there is none.

        At most the last one may be unknown to the CPU, and then it was remembered.
        """
        tails = np.full((len(sequences), length), NOT_OUTPUT, dtype=np.int64)
        rows: list[int] = []
        sources: list[int] = []
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            first = max(sequence.num_prompt, position - length)
            known = sequence.ids(first, min(position, sequence.num_tokens))
            start = length - (position - first)
            tails[row, start : start + len(known)] = known
            if start + len(known) < length:
                place, source = self._places[sequence.handle]
                assert (place, start + len(known)) == (position - 1, length - 1)
                rows.append(row)
                sources.append(source)
        tails_ml = torch.from_numpy(tails).to(self._device, non_blocking=True)
        if rows:
            assert self._ids is not None
            tails_ml[self._upload(rows), length - 1] = self._ids[self._upload(sources)]
        return tails_ml

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)
