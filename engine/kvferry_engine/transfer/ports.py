"""What the transfer service needs from the rest of an engine: link, scheduler, and its own identity and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry_engine.kv_cache.block_pool import BlockPool
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Sequence
from kvferry_engine.scheduler.plan import SequenceUpdate
from kvferry_engine.transfer.protocol.actions import TransferTimes
from kvferry_engine.transfer.ranks import Ranks
from kvferry_engine.wire.messages import Body, Counters, KVLayout, TransferAbort


class Link(Protocol):
    """Control connections to peer engines. Messages to one peer arrive in order or its connection is reported down."""

    def send(self, boot: str, message: Body) -> None:
        """Queue a message; dropped when the peer is gone."""

    def connect(self, address: str) -> None:
        """Dial host:port unless that is done; `TransferService.peer_up` follows when it answers."""


class TransferScheduler(Protocol):
    """The part of the scheduler that transfers use. All calls come from the core's thread."""

    pool: BlockPool

    def attach_prefix(self, sequence: Sequence) -> int:
        """Make the sequence REMOTE and take references on its cached prefix; return its tokens."""
        ...

    def reserve_remote(self, sequence: Sequence, num_blocks_total: int) -> list[int] | None:
        """Reserve blocks up to a total; None when there is no room."""

    def commit_remote(self, sequence: Sequence, num_blocks_total: int) -> None:
        """The leading blocks hold verified KV."""

    def finish_remote(self, sequence: Sequence, now: float) -> None:
        """Free what is reserved and not committed, and queue the sequence."""

    def add(self, sequence: Sequence, now: float) -> SequenceUpdate | None:
        """Queue a sequence (here: PREFILL). Raises errors.RequestError when it can never run."""

    def abort(self, handle: int, reason: str) -> SequenceUpdate | None:
        """Stop a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Identity and limits of this engine's transfers.

    `slot_bytes` is the payload of a staging slot; `transports` in order of preference, the last one works everywhere.
    """

    boot: str
    store_address: str
    address: str
    layout: KVLayout
    tensor_parallel: int
    pair_hash: str
    service: str = ""
    transports: tuple[str, ...] = ("gloo",)
    num_receive_slots: int = 8
    num_send_slots: int = 4
    slot_bytes: int = 4 << 20
    vocab_size: int = 1 << 31
    """Ids of prompts to prefill for others must be below."""
    min_remote_tokens: int = 128
    """Fewer missing tokens than this are computed here, unless ferrying is forced."""
    max_start_s: float = 20.0
    """A prompt for another engine that would start later than this is refused as busy."""
    times: TransferTimes = field(default_factory=TransferTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """The parts both ends of the service share.

    `next_handle` numbers PREFILL sequences among all of the engine's; `estimate_start_s` says in how many seconds a prompt
    queued now would start; `forget` tells the runner that sequences ended; `counters` are raised in place.
    """

    settings: TransferSettings
    link: Link
    scheduler: TransferScheduler
    index: PrefixIndex
    ranks: Ranks
    next_handle: Callable[[], int]
    estimate_start_s: Callable[[], float] = lambda: 0.0
    forget: Callable[[list[int]], None] = lambda handles: None
    counters: Counters = field(default_factory=Counters)

    def refuse_unknown(self, boot: str, tid: str) -> None:
        """Answer a message about a transfer that is not known here, so that the other end does not keep it."""
        self.link.send(boot, TransferAbort(tid=tid, reason="unknown transfer"))
