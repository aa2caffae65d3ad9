"""Keeps what waits to run in policy order: ready sequences in a queue, siblings behind the leader whose prompt they share."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvferry_engine.config import SchedulingPolicy
from kvferry_engine.request import Sequence, Status
from kvferry_engine.scheduler.blocks import SequenceBlocks

Key = tuple[int, float, int]
"""(priority, arrival, handle): smaller runs first. Under fcfs the priority is 0 for all."""


def policy_key(sequence: Sequence, policy: SchedulingPolicy) -> Key:
    """Return the place of a sequence in the order of the policy."""
    priority = sequence.priority if policy is SchedulingPolicy.PRIORITY else 0
    return (priority, sequence.arrival_s, sequence.handle)


class WaitingQueue:
    """Sequences by policy order; removal from the middle is lazy, so every operation is logarithmic."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[Key] = []
        self._members: dict[int, tuple[Sequence, int]] = {}
        self.num_tokens = 0
        """Tokens the members still have to compute, as estimated when they came."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """Members in no particular order."""
        return (sequence for sequence, _ in self._members.values())

    def push(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a sequence that has about `num_tokens` to compute."""
        self._members[sequence.handle] = (sequence, num_tokens)
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, policy_key(sequence, self._policy))

    def peek(self) -> Sequence | None:
        """Return the first sequence."""
        while self._heap:
            first = self._members.get(self._heap[0][2])
            if first is not None:
                return first[0]
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False when it is not here."""
        _, num_tokens = self._members.pop(sequence.handle, (None, -1))
        if num_tokens < 0:
            return False
        self.num_tokens -= num_tokens
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [policy_key(member, self._policy) for member in self]
            heapq.heapify(self._heap)
        return True


class Followers:
    """Siblings (n > 1) that wait until their leader has computed the part of the prompt they can share."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_leader: dict[int, list[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def must_wait(self, sequence: Sequence) -> bool:
        """True while going now would compute what the leader is about to compute."""
        leader = sequence.leader
        if leader is None or leader.status is Status.FINISHED or leader.num_preemptions:
            return False
        return leader.num_computed < self._shared_tokens(sequence)

    def push(self, sequence: Sequence) -> None:
        """Park a sequence behind its leader."""
        assert sequence.leader is not None
        self._by_leader.setdefault(sequence.leader.handle, []).append(sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False when it is not here."""
        if sequence.leader is None:
            return False
        siblings = self._by_leader.get(sequence.leader.handle, [])
        if sequence not in siblings:
            return False
        self._take(sequence.leader.handle, [sequence])
        return True

    def pop_ready(self, leader_handle: int) -> list[Sequence]:
        """Take out and return the siblings that need not wait for this leader any more."""
        if leader_handle not in self._by_leader:
            return []
        ready = [sequence for sequence in self._by_leader[leader_handle] if not self.must_wait(sequence)]
        self._take(leader_handle, ready)
        return ready

    def pop_all(self, leader_handle: int) -> list[Sequence]:
        """Take out and return all siblings of a leader that will never compute anything."""
        siblings = self._by_leader.pop(leader_handle, [])
        self._count -= len(siblings)
        return siblings

    def _take(self, leader_handle: int, sequences: list[Sequence]) -> None:
        left = [sequence for sequence in self._by_leader.get(leader_handle, ()) if sequence not in sequences]
        self._count -= len(sequences)
        if left:
            self._by_leader[leader_handle] = left
        else:
            self._by_leader.pop(leader_handle, None)

    def _shared_tokens(self, sequence: Sequence) -> int:
        return (sequence.num_prompt - 1) // self._block_size * self._block_size


class WaitingRoom:
    """Everything that can become ready to run: `holders` (their remote fill ended, they hold blocks), new ones, followers."""

    def __init__(self, policy: SchedulingPolicy, blocks: SequenceBlocks) -> None:
        self.holders = WaitingQueue(policy)
        self.num_arrivals = 0
        """Sequences that became ready since the start."""
        self._policy = policy
        self._blocks = blocks
        self._new = WaitingQueue(policy)
        self._followers = Followers(blocks.block_size)

    def __len__(self) -> int:
        """Sequences that are ready; followers are not."""
        return len(self.holders) + len(self._new)

    @property
    def has_followers(self) -> bool:
        """Whether somebody waits for a leader."""
        return len(self._followers) > 0

    @property
    def num_tokens(self) -> int:
        """Tokens the ready sequences still have to compute, as estimated when they came."""
        return self.holders.num_tokens + self._new.num_tokens

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait where it belongs."""
        if sequence.blocks:
            self._admit_to(self.holders, sequence)
        elif self._blocks.can_share(sequence) and self._followers.must_wait(sequence):
            self._followers.push(sequence)
        else:
            self._admit_to(self._new, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if not self.holders.remove(sequence) and not self._new.remove(sequence):
            self._followers.remove(sequence)

    def wake_followers(self, leader_handle: int, *, is_leader_known: bool = True) -> None:
        """Make the siblings ready that need not wait for this leader any more; all of them when the leader is unknown."""
        pop = self._followers.pop_ready if is_leader_known else self._followers.pop_all
        for sequence in pop(leader_handle):
            self._admit_to(self._new, sequence)

    def candidates(self) -> list[Sequence]:
        """Return whom to start next, in the order to try; when the last one has to wait for blocks, all have to.

        Holders come before others, since what they hold is idle, but a preempted sequence keeps its place in policy order.
        """
        holder, first = self.holders.peek(), self._new.peek()
        if holder is None or first is None:
            return [sequence for sequence in (holder, first) if sequence is not None]
        if first.num_preemptions and policy_key(first, self._policy) < policy_key(holder, self._policy):
            return [first, holder]
        return [holder]

    def _admit_to(self, queue: WaitingQueue, sequence: Sequence) -> None:
        self.num_arrivals += 1
        queue.push(sequence, self._blocks.uncomputed_tokens(sequence))
