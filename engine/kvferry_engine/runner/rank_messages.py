"""What rank 0 and its ranks say to each other over a local socket: typed msgspec structs, one per message, no pickle.

Reading order follows a rank's life: Setup, Started, Loaded, Allocate, Ready, then batches and service payloads, then Stop.
A service is a part of the engine that lives in every rank beside the model (the KV transfer); its payloads are opaque here.
"""

from __future__ import annotations

import msgspec

from kvferry_engine.config import EngineConfig
from kvferry_engine.runner.batch import BatchMessage


class RankMessage(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of everything on the socket."""


class Setup(RankMessage, tag="setup", frozen=True):
    """First message: who the rank is.

    Ranks meet at the file `store_path`; `service` is module:function of a factory, or empty.
    """

    rank: int
    size: int
    config: EngineConfig
    store_path: str
    service: str
    service_setup: bytes


class Allocate(RankMessage, tag="allocate", frozen=True):
    """All ranks have loaded: make the KV cache. `max_model_len` in tokens."""

    num_blocks: int
    max_model_len: int


class RunBatch(RankMessage, tag="run", frozen=True):
    """Compute a step together with the other ranks. No answer: the collectives keep ranks in step."""

    batch: BatchMessage


class ToService(RankMessage, tag="to_service", frozen=True):
    """Hand a payload to the rank's service, after everything sent before."""

    payload: bytes


class Stop(RankMessage, tag="stop", frozen=True):
    """Exit."""


class Started(RankMessage, tag="started", frozen=True):
    """The rank runs and is about to join the group."""


class Loaded(RankMessage, tag="loaded", frozen=True):
    """Weights are in place; this many bytes are left for KV on this rank."""

    available_bytes: int


class Ready(RankMessage, tag="ready", frozen=True):
    """The cache is allocated; batches may come."""


class FromService(RankMessage, tag="from_service", frozen=True):
    """The rank's service reports something."""

    payload: bytes


class Failed(RankMessage, tag="failed", frozen=True):
    """The rank is about to exit; `reason` as in `errors`."""

    reason: str
    message: str


ToRank = Setup | Allocate | RunBatch | ToService | Stop
FromRank = Started | Loaded | Ready | FromService | Failed

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: RankMessage) -> bytes:
    """msgpack bytes of a message."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Parse what rank 0 sent. Raises msgspec.DecodeError."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Parse what a rank sent. Raises msgspec.DecodeError."""
    return _from_rank.decode(data)
