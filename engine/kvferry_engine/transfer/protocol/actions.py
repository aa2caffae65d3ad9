"""What the transfer state machines are told and what they ask for, beside the wire messages themselves.

Facts are local events (a peer answered, room was found, a chunk landed, time passed); actions are carried out by
`transfer.receiving` and `transfer.sending`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry_engine.transfer.protocol.slices import ChunkRange, Stream
from kvferry_engine.wire.messages import (
    AbortAck,
    Busy,
    Chunk,
    Close,
    Done,
    Grant,
    Join,
    JoinOk,
    PairClosed,
    Prefill,
    Queued,
    Reject,
    Start,
    TransferAbort,
)

Outgoing = (
    AbortAck
    | Busy
    | Close
    | Done
    | Grant
    | Join
    | JoinOk
    | PairClosed
    | Prefill
    | Queued
    | Reject
    | Start
    | TransferAbort
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """Time limits of a transfer, in seconds. None is infinite."""

    ask_s: float = 2.0
    """From asking a peer to its first answer, connecting included."""
    start_slack_s: float = 10.0
    """How much later than estimated a peer may start."""
    stall_s: float = 2.0
    """Longest time the oldest announced payload of a pair may take before the pair counts as wedged."""
    progress_s: float = 30.0
    """Longest time a granted transfer may bring nothing at all."""
    room_retry_s: float = 0.25
    """First pause after a transfer found no room here; it doubles."""
    max_room_retries: int = 3
    join_s: float = 10.0
    """From JOIN to all pair groups being open."""
    rejoin_s: float = 1.0
    """First pause after a failed join; it doubles up to `max_rejoin_s`."""
    max_rejoin_s: float = 30.0
    closing_s: float = 30.0
    """How long a sender remembers a transfer that is sent and not closed."""


class Outcome(StrEnum):
    """How an announced payload ended at the receiver."""

    OK = "ok"
    TOMBSTONE = "tombstone"
    """The sender took it back: the trailer never came."""
    CORRUPT = "corrupt"
    """The trailer names another payload, or the sums differ."""
    FAILED = "failed"
    """The pair broke."""


# --- facts of the receiver ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start asking."""


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The candidate is connected and compatible; `boot` names it."""

    boot: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The candidate cannot be used (other layout, no pair, not reachable)."""

    reason: str


@dataclass(frozen=True, slots=True)
class PairReady:
    """Pair groups with the peer are open."""

    streams: tuple[Stream, ...]
    num_layers: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Pair groups with the peer are gone; `is_dead` says that the peer is, too."""

    boot: str
    reason: str
    is_dead: bool


@dataclass(frozen=True, slots=True)
class Room:
    """Answer to `Reserve`."""

    is_reserved: bool


@dataclass(frozen=True, slots=True)
class Landed:
    """An announced chunk of this transfer was verified and scattered, or was not."""

    chunk: Chunk
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OwnerAbort:
    """Whoever owns the request gave it up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# --- facts of the sender ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cached:
    """`num_blocks` leading blocks of the prompt are in the prefix cache already."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt runs: `num_blocks` leading blocks have KV so far (0 when the first chunk is about to run).

    `is_finished`: no more are coming.
    """

    num_blocks: int
    is_finished: bool
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """The prompt will not be computed here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A chunk left (or was taken back): its blocks are not read any more."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Block `block` is not in the cache (any more)."""

    block: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver reserved room and the pair groups are open."""

    streams: tuple[Stream, ...]
    num_layers: int


# --- actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the peer."""

    boot: str
    message: Outgoing


@dataclass(frozen=True, slots=True)
class Reach:
    """Connect candidate `index`, check it, and answer PeerReady or PeerRefused."""

    index: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Have the pair opened (PairReady follows) and send PREFILL with this id, from block `have_blocks` on."""

    boot: str
    tid: str
    have_blocks: int


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The pair broke before it was needed: have it opened again (PairReady or PeerRefused follows)."""

    boot: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks up to `num_blocks` and answer Room at once."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The first `num_blocks` blocks are verified: they belong to the prefix cache now."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The transfer is over: free what is reserved and not committed, let the sequence compute the rest."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopCompute:
    """Nobody wants the prompt any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class CancelSends:
    """Take back chunks of this transfer that have not begun to travel."""


ReceiverFact = Begin | PeerReady | PeerRefused | PairReady | PeerLost | Room | Landed | OwnerAbort | Tick
ReceiverEvent = ReceiverFact | Queued | Busy | Reject | Start | Chunk | Done | TransferAbort | AbortAck
SenderFact = Cached | Progress | ComputeFailed | Sent | Evicted | Granted | PeerLost | Tick
SenderEvent = SenderFact | Close | TransferAbort
Action = Tell | Reach | Ask | Rejoin | Reserve | Commit | Finish | StopCompute | CancelSends


def range_of(chunk: Chunk) -> ChunkRange:
    """Block and layer ranges of an announced chunk."""
    return ChunkRange(chunk.block_start, chunk.block_stop, chunk.layer_start, chunk.layer_stop)
