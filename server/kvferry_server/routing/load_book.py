"""What every engine has to do right now: its own last report, corrected by what this router sent since.

A report is half a second old when the next burst arrives; without the correction every request of the burst would go to
the engine that looked idle. Pure bookkeeping; `dispatcher` feeds it, `snapshot` turns it into what policies see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry_engine.wire.messages import Load


@dataclass(slots=True)
class _Sent:
    """A request that the engine's report does not count yet."""

    num_sequences: int
    tokens: int
    accepted: bool = False


@dataclass(slots=True)
class _Entry:
    load: Load = field(default_factory=Load)
    unreported: dict[str, _Sent] = field(default_factory=dict)
    num_mine: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """Load of one engine with corrections; tokens are uncached prompt tokens still to compute."""

    num_running: int = 0
    num_waiting: int = 0
    """Reported as waiting."""
    num_pending: int = 0
    """Sent by this router since the last report."""
    waiting_tokens: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    transfer_bytes_per_s: float = 0.0

    @property
    def num_in_flight(self) -> int:
        return self.num_running + self.num_waiting + self.num_pending


class LoadBook:
    """Loads by boot id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def reported(self, boot: str, load: Load) -> None:
        """Take a BEAT's or STEP's load: it counts everything the engine had accepted before it was sent."""
        entry = self._entry(boot)
        entry.load = load
        for rid in [rid for rid, sent in entry.unreported.items() if sent.accepted]:
            del entry.unreported[rid]

    def submitted(self, boot: str, rid: str, *, num_sequences: int, tokens: int) -> None:
        """A SUBMIT went out; `tokens` are the prompt tokens the engine is expected to compute itself."""
        entry = self._entry(boot)
        entry.unreported[rid] = _Sent(num_sequences, tokens)
        entry.num_mine[rid] = num_sequences

    def accepted(self, boot: str, rid: str) -> None:
        sent = self._entry(boot).unreported.get(rid)
        if sent is not None:
            sent.accepted = True

    def released(self, boot: str, rid: str) -> None:
        """The request ended, failed or moved away."""
        entry = self._entries.get(boot)
        if entry is not None:
            entry.unreported.pop(rid, None)
            entry.num_mine.pop(rid, None)

    def forget(self, boot: str) -> None:
        self._entries.pop(boot, None)

    def num_mine(self, boot: str) -> int:
        """Sequences that this router has on an engine."""
        entry = self._entries.get(boot)
        return sum(entry.num_mine.values()) if entry is not None else 0

    def view(self, boot: str) -> LoadView:
        """Return the corrected load."""
        entry = self._entries.get(boot)
        if entry is None:
            return LoadView()
        load = entry.load
        return LoadView(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_pending=sum(sent.num_sequences for sent in entry.unreported.values()),
            waiting_tokens=load.waiting_tokens + sum(sent.tokens for sent in entry.unreported.values()),
            free_blocks=load.free_blocks,
            used_blocks=load.used_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            transfer_bytes_per_s=load.transfer_bytes_per_s,
        )

    def _entry(self, boot: str) -> _Entry:
        return self._entries.setdefault(boot, _Entry())
