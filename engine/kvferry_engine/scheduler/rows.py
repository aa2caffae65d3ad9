"""The running sequences as rows of persistent arrays, so that a decode step is planned without touching each sequence.

A sequence gets a slot when it is admitted and keeps it until it finishes or is preempted. Arrays hold what planning reads;
`Sequence` fields hold what has retired. `planning` turns rows into a step.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.request import Int32, Purpose, Sequence
from kvferry_engine.scheduler.plan import PLACEHOLDER
from kvferry_engine.scheduler.waiting import policy_key

Bool = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.intp]
"""Slot numbers in the type numpy indexes with (int32 costs a conversion at every use)."""

NEVER = np.iinfo(np.int32).max
NUM_STOP_IDS = 8
"""Stop ids kept per row for the vectorised test; a row with more is looked at one by one."""
_NO_ID = -2
"""Equal to no token id and no placeholder."""


class RunningRows:
    """Slots [max_num_seqs] and the order in which running sequences are served (policy order).

    Per slot, int32: `planned` tokens with KV once all launched steps retired; `total` tokens known or being sampled; `known`
    tokens known; `limit` total at which nothing more is computed; `decode_from` first position that counts as output (NEVER
    for PREFILL); `last_token` token total - 1 or PLACEHOLDER; `num_blocks`; `num_indexed` blocks already offered to the
    prefix index. `tables` [slots, max_blocks] block ids, 0 beyond `num_blocks`. int64: `serial`, unique per admission, so
    that a result for an earlier life of the slot is recognised; `generation` of the sequence. For finish rules: `stop_ids`
    [slots, NUM_STOP_IDS]; `is_watched` rows whose rules do not fit into the vectorised test.
    """

    def __init__(self, *, num_slots: int, max_blocks: int, block_size: int, policy: SchedulingPolicy) -> None:
        self.tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.planned = np.zeros(num_slots, dtype=np.int32)
        self.total = np.zeros(num_slots, dtype=np.int32)
        self.known = np.zeros(num_slots, dtype=np.int32)
        self.limit = np.zeros(num_slots, dtype=np.int32)
        self.decode_from = np.zeros(num_slots, dtype=np.int32)
        self.last_token = np.zeros(num_slots, dtype=np.int32)
        self.num_blocks = np.zeros(num_slots, dtype=np.int32)
        self.num_indexed = np.zeros(num_slots, dtype=np.int32)
        self.serial = np.full(num_slots, -1, dtype=np.int64)
        self.generation = np.zeros(num_slots, dtype=np.int64)
        self.stop_ids = np.full((num_slots, NUM_STOP_IDS), _NO_ID, dtype=np.int32)
        self.is_watched = np.zeros(num_slots, dtype=np.bool_)
        self.by_slot: list[Sequence | None] = [None] * num_slots
        self.sequences: list[Sequence] = []
        """Running sequences in policy order; the first one is never preempted."""
        self._block_size = block_size
        self._policy = policy
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._next_serial = 0
        self._slots: Slots | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_full(self) -> bool:
        """True when no slot is left."""
        return not self._free_slots

    @property
    def slots(self) -> Slots:
        """Slots of the running sequences in policy order [running]."""
        if self._slots is None:
            self._slots = np.asarray([sequence.slot for sequence in self.sequences], dtype=np.intp)
        return self._slots

    def bind(self, sequence: Sequence, limit: int) -> None:
        """Give an admitted sequence a slot and load its state. `limit` is `Limits.length`, ignored for PREFILL."""
        slot = self._free_slots.pop()
        sequence.slot = slot
        self.by_slot[slot] = sequence
        self.serial[slot] = self._next_serial
        self._next_serial += 1
        self.generation[slot] = sequence.generation
        samples = sequence.purpose is Purpose.GENERATE
        self.planned[slot] = sequence.num_computed
        self.known[slot] = sequence.num_tokens
        self.total[slot] = sequence.num_tokens if samples else sequence.upto
        self.limit[slot] = limit if samples else NEVER
        self.decode_from[slot] = sequence.num_prompt if samples else NEVER
        self.last_token[slot] = sequence.tokens[sequence.num_tokens - 1]
        self.num_indexed[slot] = sequence.num_indexed
        self.num_blocks[slot] = len(sequence.blocks)
        self.tables[slot, : len(sequence.blocks)] = sequence.blocks
        self._load_stop_rules(slot, sequence)
        insort(self.sequences, sequence, key=lambda member: policy_key(member, self._policy))
        self._slots = None

    def unbind(self, sequence: Sequence) -> None:
        """Take a sequence's slot away."""
        slot = sequence.slot
        self.tables[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0
        self.serial[slot] = -1
        self.by_slot[slot] = None
        self._free_slots.append(slot)
        sequence.slot = -1
        self.sequences.remove(sequence)
        self._slots = None

    def decodable(self) -> Slots:
        """Slots that can compute exactly their last token now, in policy order."""
        slots = self.slots
        can_decode = self._is_ready(slots) & self._is_at_last_token(slots)
        return slots if can_decode.all() else slots[can_decode]

    def prefillable(self) -> Slots:
        """Slots with several tokens (or the end of a prompt) to compute, in policy order."""
        slots = self.slots
        prefillable: Slots = slots[self._is_ready(slots) & ~self._is_at_last_token(slots)]
        return prefillable

    def is_decodable(self, slot: int) -> bool:
        """Whether all that is left of this row is its last token, an output token."""
        return bool(self._is_at_last_token(np.asarray([slot], dtype=np.intp))[0])

    def lacks_block(self, slots: Slots) -> Bool:
        """Which of these rows have no block yet for the position they compute next."""
        return self.planned[slots] >= self.num_blocks[slots] * self._block_size

    def num_growing(self) -> int:
        """Running sequences that may still ask for blocks."""
        slots = self.slots
        limit = self.limit[slots]
        return int(np.count_nonzero((limit != NEVER) & (self.num_blocks[slots] * self._block_size < limit - 1)))

    def append_blocks(self, slots: Slots, blocks: list[int]) -> None:
        """Give each of these rows one more block."""
        self.tables[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self.sequence_at(slot).blocks.append(block)

    def sequence_at(self, slot: int) -> Sequence:
        """Return the sequence in an occupied slot."""
        sequence = self.by_slot[slot]
        assert sequence is not None
        return sequence

    def sequences_at(self, slots: Slots) -> list[Sequence]:
        """Return the sequences in these occupied slots."""
        if slots is self._slots:
            return self.sequences.copy()
        return [self.sequence_at(slot) for slot in slots.tolist()]

    def advance(self, slots: Slots, counts: Int32, samples: Bool) -> None:
        """Note that a step was planned: its tokens count as computed, what it samples as a placeholder."""
        self.planned[slots] += counts
        sampled = slots[samples]
        self.total[sampled] += 1
        self.last_token[sampled] = PLACEHOLDER

    def learn(self, slots: Slots, token_ids: Int32) -> None:
        """Note the tokens a retired step sampled, one per row; rows sampled again since keep their placeholder."""
        self.known[slots] += 1
        settled = self.known[slots] == self.total[slots]
        self.last_token[slots[settled]] = token_ids[settled]

    def may_finish(self, slots: Slots, token_ids: Int32) -> Bool:
        """Which rows need the finish rules after these tokens (before `learn`); the others certainly go on."""
        hits: Bool = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        hits |= self.is_watched[slots] | (self.known[slots] + 1 >= self.limit[slots])
        return hits

    def uncomputed_prompt_tokens(self) -> int:
        """Tokens of half prefilled sequences that no launched step computes yet."""
        slots = self.slots
        left = np.minimum(self.total[slots], self.decode_from[slots]) - self.planned[slots]
        return int(np.maximum(left, 0).sum())

    def _is_ready(self, slots: Slots) -> Bool:
        total = self.total[slots]
        ready: Bool = (self.planned[slots] < total) & (total < self.limit[slots])
        return ready

    def _is_at_last_token(self, slots: Slots) -> Bool:
        planned = self.planned[slots]
        at_last: Bool = (planned == self.total[slots] - 1) & (planned >= self.decode_from[slots])
        return at_last

    def _load_stop_rules(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.sampling
        stop_ids = [*sampling.eos_token_ids, *sampling.stop_token_ids]
        self.is_watched[slot] = sampling.repetition_detection is not None or len(stop_ids) > NUM_STOP_IDS
        self.stop_ids[slot] = _NO_ID
        self.stop_ids[slot, : min(len(stop_ids), NUM_STOP_IDS)] = stop_ids[:NUM_STOP_IDS]
