"""What rank 0 asks of every rank during a transfer, and what comes back: plain msgspec structs, so that they cross processes.

Rank 0 decides (which slot, which blocks, which pair); a rank only executes (`rank_worker`). A rank carries out commands and model
steps in the order in which rank 0 issued them: that order is what makes it safe to reuse a block right after its last command.
Heads are the rank's own, counted from its first one.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvferry_engine.transfer.protocol.actions import Outcome


def transfer_mark(tid: str) -> int:
    """Fingerprint of a transfer id for payload trailers: a positive int64, never the zero that a cleared trailer holds."""
    return int.from_bytes(hashlib.sha256(tid.encode()).digest()[:8], "little") >> 1 | 1


class PairId(msgspec.Struct, array_like=True, frozen=True):
    """One process group of two: this rank and one rank of a peer engine, one direction, one epoch."""

    p_boot: str
    d_boot: str
    p_rank: int
    d_rank: int
    epoch: int

    @property
    def prefix(self) -> str:
        """Key prefix in the receiver's store; unique over restarts, ranks and epochs."""
        return f"kvferry/{self.p_boot}/{self.d_boot}/{self.p_rank}-{self.d_rank}/{self.epoch}"


class Command(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of everything rank 0 asks for."""


class OpenPair(Command, tag="open", frozen=True):
    """Construct the group in the background; `PairOpened` or `PairBroken` follows."""

    pair: PairId
    is_sender: bool
    transport: str
    store_address: str


class ClosePair(Command, tag="close", frozen=True):
    """Close the group; everything posted on it comes back as failed."""

    pair: PairId


class PostReceive(Command, tag="post", frozen=True):
    """Receive payload `pair_seq` of `num_bytes` (and its trailer) into receive slot `slot`."""

    pair: PairId
    pair_seq: int
    slot: int
    num_bytes: int


class Scatter(Command, tag="scatter", frozen=True):
    """Verify the payload in `slot` and copy it into the cache; `Scattered` follows. blocks: packed int32 block ids."""

    pair: PairId
    pair_seq: int
    slot: int
    num_bytes: int
    mark: int
    blocks: bytes
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int


class Send(Command, tag="send", frozen=True):
    """Gather blocks into send slot `slot`, add the trailer, send; `PayloadSent` follows.

    Transports that need it wait for `Launch` in between.
    """

    pair: PairId
    pair_seq: int
    slot: int
    num_bytes: int
    mark: int
    blocks: bytes
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int


class Launch(Command, tag="launch", frozen=True):
    """The peer has posted its receive of `pair_seq`."""

    pair: PairId
    pair_seq: int


class CancelSend(Command, tag="cancel", frozen=True):
    """Send a tombstone instead, if the payload has not begun to travel."""

    pair: PairId
    pair_seq: int


class RankEvent(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of everything a rank reports."""


class PairOpened(RankEvent, tag="opened", frozen=True):
    pair: PairId


class PairBroken(RankEvent, tag="broken", frozen=True):
    """The group could not be constructed, or a payload failed on it."""

    pair: PairId
    reason: str


class ReceivePosted(RankEvent, tag="posted", frozen=True):
    """Only from transports whose sender must wait for it."""

    pair: PairId
    pair_seq: int


class PayloadReceived(RankEvent, tag="received", frozen=True):
    """Something (perhaps a tombstone) is in the slot, or the pair broke (`is_ok` False)."""

    pair: PairId
    pair_seq: int
    is_ok: bool


class Scattered(RankEvent, tag="scattered", frozen=True):
    pair: PairId
    pair_seq: int
    outcome: Outcome


class PayloadSent(RankEvent, tag="sent", frozen=True):
    pair: PairId
    pair_seq: int
    is_ok: bool


AnyCommand = OpenPair | ClosePair | PostReceive | Scatter | Send | Launch | CancelSend
AnyEvent = PairOpened | PairBroken | ReceivePosted | PayloadReceived | Scattered | PayloadSent

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_events_decoder = msgspec.msgpack.Decoder(list[AnyEvent])


def encode_command(command: AnyCommand) -> bytes:
    """msgpack bytes of a command, for a rank in another process."""
    return _encoder.encode(command)


def decode_command(data: bytes) -> AnyCommand:
    """Inverse of `encode_command`. Raises msgspec.DecodeError."""
    return _command_decoder.decode(data)


def encode_events(events: list[AnyEvent]) -> bytes:
    """msgpack bytes of what a rank reports."""
    return _encoder.encode(events)


def decode_events(data: bytes) -> list[AnyEvent]:
    """Inverse of `encode_events`. Raises msgspec.DecodeError."""
    return _events_decoder.decode(data)
