"""Decides what the next step computes: who runs, how many tokens of each, in which blocks.

One token budget serves decodes and prefill chunks: running sequences first, then those whose ferried KV is complete, then
new ones by policy. Pure: no tensors, sockets or clock. The parts are `waiting` (queues), `rows` (running sequences as arrays),
`blocks` (who holds which block), `preemption`, `planning` and `retirement`; this class joins them.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from kvferry_engine.kv_cache.block_pool import NO_FENCE, BlockPool, Owner
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Purpose, Sequence, Status
from kvferry_engine.scheduler.blocks import SequenceBlocks
from kvferry_engine.scheduler.config import SchedulerConfig
from kvferry_engine.scheduler.finish import finish_of
from kvferry_engine.scheduler.limits import Limits
from kvferry_engine.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from kvferry_engine.scheduler.planning import Flight, build_plan
from kvferry_engine.scheduler.preemption import choose_victim
from kvferry_engine.scheduler.retirement import show_placeholders, take_results
from kvferry_engine.scheduler.rows import RunningRows, Slots
from kvferry_engine.scheduler.waiting import Key, WaitingRoom, policy_key
from kvferry_engine.wire.messages import Finish, FinishReason

_TOO_LATE = Finish(reason=FinishReason.ABORT, message="deadline exceeded")


class Scheduler:
    """The sequences of one engine. `sequences` holds the unfinished ones by handle, REMOTE ones included."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, index: PrefixIndex) -> None:
        self.config = config
        self.pool = pool
        self.sequences: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._limits = Limits(max_model_len=config.max_model_len, capacity_tokens=pool.num_blocks * pool.block_size)
        self._index = index
        self._blocks = SequenceBlocks(pool, index, enable_prefix_caching=config.enable_prefix_caching)
        self._rows = RunningRows(
            num_slots=config.max_num_seqs,
            max_blocks=self._blocks.blocks_for(min(config.max_model_len, self._limits.capacity_tokens)),
            block_size=pool.block_size,
            policy=config.policy,
        )
        self._waiting = WaitingRoom(config.policy, self._blocks)
        self._deadlines: list[tuple[float, int]] = []
        self._flights: deque[Flight] = deque()
        self._last_number = 0
        self._pending: list[SequenceUpdate] = []
        self._short_of_blocks: Key | None = None
        """First sequence in policy order that the last `schedule` could not serve for lack of blocks."""
        self._refused_in: tuple[int, ...] = ()
        self._refused: set[int] = set()
        """Handles whose admission failed in the state `_refused_in`; in the same state it fails again."""
        self._stalled_in: tuple[int, ...] = ()
        """State in which nothing could be planned although nothing was in flight; in the same state nothing can."""

    # --- load -------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, those being filled from another engine included."""
        return len(self.sequences) - len(self._rows)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens, queued or half prefilled, that must still be computed here (an estimate: caches change)."""
        return self._waiting.num_tokens + self._rows.uncomputed_prompt_tokens()

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache since the start."""
        return self._blocks.num_queried

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens found in the prefix cache since the start."""
        return self._blocks.num_hit

    @property
    def has_work(self) -> bool:
        """Whether `schedule` or `drain_updates` can have something now; False while all that waits needs a transfer to end."""
        if self._pending:
            return True
        return bool(self._rows or self._waiting) and self._stalled_in != self._state()

    # --- sequences come and go --------------------------------------------------------------------------------------

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError for a sequence that can never run here, whatever else happens."""
        self._limits.check(sequence)

    def add(self, sequence: Sequence, now: float) -> SequenceUpdate | None:
        """Queue a sequence (a REMOTE one: go on locally with the blocks it has).

        One that is over already is not queued, the update that finishes it is returned: past its deadline, or resumed with
        emitted tokens that end it. Raises RequestError as `check` does.
        """
        if sequence.handle in self.sequences:
            self.finish_remote(sequence, now)
            return None
        self.check(sequence)
        finish = self._finish_before_start(sequence, now)
        if finish is not None:
            return self._end(sequence, finish)
        self._register(sequence)
        sequence.status = Status.WAITING
        self._waiting.push(sequence)
        return None

    def abort(self, handle: int, reason: str) -> SequenceUpdate | None:
        """End a sequence now; unknown handles are ignored. Its blocks are free at once or when launched steps retired."""
        sequence = self.sequences.get(handle)
        if sequence is None:
            self._waiting.wake_followers(handle, is_leader_known=False)
            return None
        return self._end(sequence, Finish(reason=FinishReason.ABORT, message=reason))

    def expired(self, now: float) -> list[SequenceUpdate]:
        """End every sequence past its deadline, REMOTE ones too; return that and all other news since the last call."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self.sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                self._pending.append(self._end(sequence, _TOO_LATE))
        return self.drain_updates()

    def drain_updates(self) -> list[SequenceUpdate]:
        """Return news that `schedule` made: PREFILL sequences that start (num_computed: found in the cache) or are done."""
        updates, self._pending = self._pending, []
        return updates

    def drop_prefix_cache(self) -> None:
        """Forget all cached KV; running sequences keep theirs, privately."""
        self._blocks.drop_cache()

    # --- KV from another engine -------------------------------------------------------------------------------------

    def attach_prefix(self, sequence: Sequence) -> int:
        """Make a new sequence REMOTE and take references on its locally cached prefix; return the tokens that covers.

        Full blocks only, never the whole prompt. The sequence stays REMOTE until `finish_remote` or `add`. Raises
        RequestError as `check` does.
        """
        if sequence.handle not in self.sequences:
            self.check(sequence)
            self._register(sequence)
            sequence.status = Status.REMOTE
            self._blocks.attach_prefix(sequence)
        return sequence.num_computed

    def reserve_remote(self, sequence: Sequence, num_blocks_total: int) -> list[int] | None:
        """Reserve blocks for ferried KV, from those the sequence has up to `num_blocks_total`; return the new ones.

        None: no room now, or the sequence ended, or one before it in policy order waits for room itself.
        """
        if sequence.status is not Status.REMOTE:
            return None
        if self._short_of_blocks is not None and self._short_of_blocks < self._key(sequence):
            return None
        return self._blocks.reserve(sequence, num_blocks_total, margin=self._rows.num_growing())

    def commit_remote(self, sequence: Sequence, num_blocks_total: int) -> None:
        """The leading `num_blocks_total` blocks hold verified KV: index them. Ignored when the sequence ended meanwhile."""
        if sequence.status is not Status.REMOTE:
            return
        self._blocks.commit(sequence, num_blocks_total)
        self._waiting.wake_followers(sequence.handle)

    def finish_remote(self, sequence: Sequence, now: float) -> None:
        """The transfer is over, complete or not: give back what was not committed and queue ahead of new sequences.

        One that `add` would not queue ends instead (`drain_updates`). Ignored when it ended meanwhile.
        """
        if sequence.status is not Status.REMOTE:
            return
        finish = self._finish_before_start(sequence, now)
        if finish is not None:
            self._pending.append(self._end(sequence, finish))
            return
        self._blocks.trim(sequence)
        sequence.status = Status.WAITING
        self._waiting.push(sequence)

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None: nothing can run, or `lookahead` + 1 steps are in flight already."""
        if len(self._flights) > self.config.lookahead:
            return None
        if self._flights:
            show_placeholders(self._flights[-1], self._rows)
        self._short_of_blocks = None
        budget = self.config.max_num_batched_tokens
        decode_slots = self._rows.decodable()
        decode_slots = self._with_room(decode_slots if len(decode_slots) <= budget else decode_slots[:budget])
        budget -= len(decode_slots)
        chunks = self._continue_prefills(budget)
        budget -= sum(count for _, count in chunks)
        chunks += self._admit(budget, now)
        if not len(decode_slots) and not chunks:
            self._stalled_in = () if self._flights else self._state()
            return None
        self._last_number += 1
        flight = build_plan(self._last_number, self._rows, decode_slots, chunks)
        self._flights.append(flight)
        return flight.plan

    def retire(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take in the result of the oldest launched step; return what it changed and news of `schedule`."""
        flight = self._flights.popleft()
        assert flight.plan.number == plan.number, "steps retire in the order they were launched"
        self.pool.retired(plan.number)
        news = self.drain_updates()
        updates = take_results(flight, result, self._rows, self._blocks, now)
        for update in updates:
            if update.finish is not None:
                self._end(update.sequence, update.finish)
        if self._waiting.has_followers:
            for sequence in plan.sequences:
                self._waiting.wake_followers(sequence.handle)
        return news + updates

    # --- parts of a step --------------------------------------------------------------------------------------------

    def _with_room(self, slots: Slots) -> Slots:
        """Give every decode row a block for its next token; return the rows that have one, after preempting if necessary."""
        is_short = self._rows.lacks_block(slots)
        num_short = int(np.count_nonzero(is_short))
        if num_short == 0:
            return slots
        if num_short <= self.pool.num_free:
            self._grow(slots[is_short])
            return slots
        serials = self._rows.serial[slots]
        num_coming = self.pool.num_fenced
        for slot, serial in zip(slots[is_short].tolist(), serials[is_short].tolist(), strict=True):
            if self._rows.serial[slot] == serial:
                num_coming = self._grow_or_wait(self._rows.sequence_at(slot), num_coming)
        kept: Slots = slots[(self._rows.serial[slots] == serials) & ~self._rows.lacks_block(slots)]
        return kept

    def _grow_or_wait(self, sequence: Sequence, num_coming: int) -> int:
        """Give one row a block if one is free or can be freed; return how many fenced blocks are left for others to wait for."""
        while self.pool.num_free == 0 and num_coming == 0:
            victim = choose_victim(sequence, self._rows.sequences, self._waiting.holders, self.config.policy)
            if victim is None:
                self._note_shortage(sequence)
                return num_coming
            fenced = self.pool.num_fenced
            self._preempt(victim)
            num_coming += self.pool.num_fenced - fenced
        if self.pool.num_free == 0:
            self._note_shortage(sequence)
            return num_coming - 1
        self._grow(np.asarray([sequence.slot], dtype=np.intp))
        return num_coming

    def _grow(self, slots: Slots) -> None:
        handles = np.asarray([self._rows.sequence_at(slot).handle for slot in slots.tolist()], dtype=np.int64)
        blocks = self.pool.allocate(len(slots), Owner.SEQUENCE, handles)
        assert blocks is not None
        self._rows.append_blocks(slots, blocks)

    def _continue_prefills(self, budget: int) -> list[tuple[int, int]]:
        """Return (slot, count) of running sequences with prompt left, as far as the budget goes."""
        chunks = []
        for slot in self._rows.prefillable().tolist():
            if budget <= 0:
                break
            chunks.append(self._chunk(slot, budget))
            budget -= chunks[-1][1]
        return chunks

    def _admit(self, budget: int, now: float) -> list[tuple[int, int]]:
        """Start waiting sequences while budget, slots and blocks last; return (slot, count) of their first chunks."""
        chunks: list[tuple[int, int]] = []
        while budget > 0 and not self._rows.is_full:
            sequence = self._next_admissible()
            if sequence is None:
                break
            self._waiting.remove(sequence)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
            if sequence.purpose is Purpose.PREFILL and self._start_prefill(sequence):
                continue
            sequence.status = Status.RUNNING
            self._rows.bind(sequence, self._limits.length(sequence))
            chunks.append(self._chunk(sequence.slot, budget))
            budget -= chunks[-1][1]
        return chunks

    def _next_admissible(self) -> Sequence | None:
        """Return the next waiting sequence, now with blocks for all it knows; None when it must go on waiting for them."""
        candidates = self._waiting.candidates()
        for sequence in candidates:
            if self._give_blocks(sequence, may_strip=sequence is candidates[-1]):
                return sequence
            self._note_shortage(sequence)
        return None

    def _give_blocks(self, sequence: Sequence, *, may_strip: bool) -> bool:
        """Reserve blocks for all known tokens and one more; room for the growth of running sequences is left alone.

        When nothing runs, and so nothing will come free, other holders give way to the first one (`may_strip`).
        """
        state = self._state()
        if state != self._refused_in:
            self._refused_in = state
            self._refused.clear()
        elif sequence.handle in self._refused:
            return False
        num_tokens = self._limits.kv_tokens_to_start(sequence)
        if self._blocks.admit(sequence, num_tokens, margin=self._rows.num_growing()):
            return True
        if may_strip and not self._rows and not self._flights:
            for holder in sorted(self._waiting.holders, key=self._key, reverse=True):
                if holder is sequence:
                    continue
                self._preempt(holder)
                if self._blocks.admit(sequence, num_tokens, margin=0):
                    return True
        self._refused.add(sequence.handle)
        return False

    def _start_prefill(self, sequence: Sequence) -> bool:
        """Announce that a PREFILL sequence starts; True when the cache already holds all of it, which ends it."""
        if sequence.num_computed < sequence.upto:
            self._pending.append(
                SequenceUpdate(sequence=sequence, token_ids=[], offset=0, num_computed=sequence.num_computed)
            )
            return False
        update = self._end(sequence, Finish(reason=FinishReason.STOP))
        self._pending.append(update)
        return True

    def _chunk(self, slot: int, budget: int) -> tuple[int, int]:
        return (slot, min(budget, int(self._rows.total[slot] - self._rows.planned[slot])))

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence or a holder; it starts again from what the cache still has."""
        self.num_preemptions += 1
        self._take_away(sequence)
        sequence.num_preemptions += 1
        sequence.tokens_since_preemption = 0
        sequence.num_computed = 0
        sequence.status = Status.WAITING
        self._waiting.push(sequence)
        self._waiting.wake_followers(sequence.handle)

    # --- small parts ------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[int, ...]:
        """What decides whether an allocation that failed would fail again."""
        return (
            self.pool.num_returned,
            self._index.num_inserted,
            self._waiting.num_arrivals,
            len(self._waiting.holders),
            len(self._rows),
            len(self._flights),
        )

    def _key(self, sequence: Sequence) -> Key:
        return policy_key(sequence, self.config.policy)

    def _finish_before_start(self, sequence: Sequence, now: float) -> Finish | None:
        """Why there is nothing left to do for a sequence that has not run here yet."""
        if sequence.deadline_s is not None and sequence.deadline_s <= now:
            return _TOO_LATE
        return finish_of(sequence, self._limits.length(sequence)) if sequence.purpose is Purpose.GENERATE else None

    def _register(self, sequence: Sequence) -> None:
        self.sequences[sequence.handle] = sequence
        if sequence.deadline_s is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.handle))

    def _end(self, sequence: Sequence, finish: Finish) -> SequenceUpdate:
        """Finish a sequence; the update returned is the last news of it."""
        num_computed = sequence.num_computed
        self._take_away(sequence)
        self._pending[:] = [update for update in self._pending if update.sequence is not sequence]
        sequence.status = Status.FINISHED
        sequence.finish = finish
        self.sequences.pop(sequence.handle, None)
        self._waiting.wake_followers(sequence.handle)
        return SequenceUpdate(
            sequence=sequence, token_ids=[], offset=sequence.num_output, finish=finish, num_computed=num_computed
        )

    def _take_away(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is and release its blocks; results in flight for it will be dropped."""
        if sequence.slot >= 0:
            self._rows.unbind(sequence)
        else:
            self._waiting.remove(sequence)
        self._blocks.release(sequence, fence=self._last_number if sequence.num_inflight else NO_FENCE)
        sequence.generation += 1
        sequence.num_placeholders = 0

    def _note_shortage(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        if self._short_of_blocks is None or key < self._short_of_blocks:
            self._short_of_blocks = key
