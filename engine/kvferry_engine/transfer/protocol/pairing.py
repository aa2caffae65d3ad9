"""Opens and closes the pair groups between two engines, one machine per direction and end; a new try is a new epoch.

The receiver of KV leads: it sends JOIN, both ends construct their groups after JOIN_OK, and whoever sees trouble closes all
groups of the epoch and says PAIR_CLOSED. Nothing of an old epoch is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry_engine.transfer.protocol.actions import TransferTimes


class PairState(StrEnum):
    CLOSED = "closed"
    JOINING = "joining"
    """JOIN is on its way (receiver only)."""
    OPENING = "opening"
    """The groups are being constructed."""
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class SendJoin:
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenGroups:
    """Construct the group of every rank pair."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseGroups:
    """Close what was constructed, also groups that finish constructing later."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SayClosed:
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class PairsUp:
    """All groups are open: transfers may use them."""


@dataclass(frozen=True, slots=True)
class PairsDown:
    """The groups are gone (or never came): transfers over them end."""

    reason: str


PairAction = SendJoin | OpenGroups | CloseGroups | SayClosed | PairsUp | PairsDown


class ReceiverPairs:
    """Receiver's view of all rank pairs with one sender engine."""

    def __init__(self, num_groups: int, times: TransferTimes, *, epoch: int = 0) -> None:
        """`epoch`: the last one used with this peer process."""
        self.state = PairState.CLOSED
        self.epoch = epoch
        self._num_groups = num_groups
        self._num_open = 0
        self._times = times
        self._deadline_s: float | None = None
        self._not_before_s = 0.0
        self._num_failures = 0

    def next_timer_s(self) -> float | None:
        return self._deadline_s

    def can_join(self, now: float) -> bool:
        """False while a failed join is too fresh to try again."""
        return self.state is not PairState.CLOSED or now >= self._not_before_s

    def want(self, now: float) -> list[PairAction]:
        """Some transfer needs the pairs."""
        if self.state is PairState.OPEN:
            return [PairsUp()]
        if self.state is not PairState.CLOSED:
            return []
        self.epoch += 1
        self.state = PairState.JOINING
        self._num_open = 0
        self._deadline_s = now + self._times.join_s
        return [SendJoin(self.epoch)]

    def joined(self, epoch: int, is_ok: bool, message: str, now: float) -> list[PairAction]:
        """JOIN_OK arrived."""
        if epoch != self.epoch or self.state is not PairState.JOINING:
            return []
        if not is_ok:
            return self._close(f"join refused: {message}", now, tell=False, is_failure=True)
        self.state = PairState.OPENING
        return [OpenGroups(self.epoch)]

    def opened(self, epoch: int, now: float) -> list[PairAction]:
        """One group is open here."""
        if epoch != self.epoch or self.state is not PairState.OPENING:
            return []
        self._num_open += 1
        if self._num_open < self._num_groups:
            return []
        self.state = PairState.OPEN
        self._deadline_s = None
        self._num_failures = 0
        return [PairsUp()]

    def failed(self, epoch: int, reason: str, now: float) -> list[PairAction]:
        """A group of this end broke, could not be constructed, or is wedged."""
        if epoch != self.epoch:
            return []
        return self._close(reason, now, tell=True, is_failure=self.state is not PairState.OPEN)

    def peer_closed(self, epoch: int, reason: str, now: float) -> list[PairAction]:
        """PAIR_CLOSED arrived."""
        if epoch != self.epoch:
            return []
        return self._close(reason, now, tell=False, is_failure=self.state is not PairState.OPEN)

    def tick(self, now: float) -> list[PairAction]:
        if self._deadline_s is None or now < self._deadline_s:
            return []
        return self._close("join took too long", now, tell=True, is_failure=True)

    def _close(self, reason: str, now: float, *, tell: bool, is_failure: bool) -> list[PairAction]:
        if self.state is PairState.CLOSED:
            return []
        self.state = PairState.CLOSED
        self._deadline_s = None
        if is_failure:
            pause = min(self._times.rejoin_s * 2**self._num_failures, self._times.max_rejoin_s)
            self._num_failures += 1
            self._not_before_s = now + pause
        actions: list[PairAction] = [CloseGroups(self.epoch)]
        if tell:
            actions.append(SayClosed(self.epoch, reason))
        return [*actions, PairsDown(reason)]


class SenderPairs:
    """Sender's view of all rank pairs with one receiver engine."""

    def __init__(self) -> None:
        self.state = PairState.CLOSED
        self.epoch = 0
        self._num_groups = 0
        self._num_open = 0

    def join(self, epoch: int, num_groups: int) -> list[PairAction]:
        """An acceptable JOIN arrived (JOIN_OK goes out before the actions are carried out); old epochs are ignored."""
        if epoch <= self.epoch:
            return []
        actions = self._close(f"epoch {epoch} begins", tell=False)
        self.epoch = epoch
        self.state = PairState.OPENING
        self._num_groups = num_groups
        self._num_open = 0
        return [*actions, OpenGroups(epoch)]

    def opened(self, epoch: int) -> list[PairAction]:
        if epoch != self.epoch or self.state is not PairState.OPENING:
            return []
        self._num_open += 1
        if self._num_open < self._num_groups:
            return []
        self.state = PairState.OPEN
        return [PairsUp()]

    def failed(self, epoch: int, reason: str) -> list[PairAction]:
        return self._close(reason, tell=True) if epoch == self.epoch else []

    def peer_closed(self, epoch: int, reason: str) -> list[PairAction]:
        return self._close(reason, tell=False) if epoch == self.epoch else []

    def _close(self, reason: str, *, tell: bool) -> list[PairAction]:
        if self.state is PairState.CLOSED:
            return []
        self.state = PairState.CLOSED
        actions: list[PairAction] = [CloseGroups(self.epoch)]
        if tell:
            actions.append(SayClosed(self.epoch, reason))
        return [*actions, PairsDown(reason)]
