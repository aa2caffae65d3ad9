"""Who the peer engines are, and whether KV may travel between them and this engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.transfer.ports import TransferSettings
from kvferry_engine.transfer.protocol.slices import Stream, fit_streams, make_streams
from kvferry_engine.wire.messages import Hello, PrefillHint


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected engine. `refusal` says why no KV may travel; empty when it may."""

    boot: str
    name: str
    tensor_parallel: int
    refusal: str


class Peers:
    """Connected peer engines by boot and by address."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._by_boot: dict[str, Peer] = {}
        self._boot_of_address: dict[str, str] = {}

    def up(self, boot: str, hello: Hello, address: str) -> Peer:
        """A peer said HELLO (again). `address`: what was dialled, empty when it dialled us."""
        model = hello.model
        peer = Peer(boot, hello.name, 1 if model is None else model.tensor_parallel, self._refusal(hello))
        self._by_boot[boot] = peer
        for known in (address, hello.address):
            if known:
                self._boot_of_address[known] = boot
        return peer

    def down(self, boot: str) -> None:
        """A peer is gone."""
        self._by_boot.pop(boot, None)
        self._boot_of_address = {address: its for address, its in self._boot_of_address.items() if its != boot}

    def get(self, boot: str) -> Peer | None:
        return self._by_boot.get(boot)

    def find(self, hint: PrefillHint) -> Peer | None:
        """The connected engine a hint means; one that restarted at the same address will do."""
        peer = self._by_boot.get(hint.boot)
        return peer if peer is not None else self._by_boot.get(self._boot_of_address.get(hint.address, ""))

    def _refusal(self, hello: Hello) -> str:
        settings, model = self._settings, hello.model
        if model is None:
            return "the peer has no model"
        if model.pair_hash != settings.pair_hash or model.layout != settings.layout:
            return "the peer's KV is of another kind"
        if model.tensor_parallel < 1:
            return f"the peer claims {model.tensor_parallel} ranks"
        if hello.service and settings.service and hello.service != settings.service:
            return "the peer belongs to another service"
        try:
            make_streams(model.tensor_parallel, settings.tensor_parallel, settings.layout.num_kv_heads)
            make_streams(settings.tensor_parallel, model.tensor_parallel, settings.layout.num_kv_heads)
        except ValueError as error:
            return str(error)
        return ""


def streams_between(
    sender_ranks: int, receiver_ranks: int, settings: TransferSettings, slot_bytes: int
) -> tuple[Stream, ...]:
    """Streams of a direction, split to fit slots of `slot_bytes`. Raises ValueError when they cannot."""
    streams = make_streams(sender_ranks, receiver_ranks, settings.layout.num_kv_heads)
    return tuple(fit_streams(streams, settings.layout, slot_bytes))


def rank_pairs(streams: tuple[Stream, ...]) -> list[tuple[int, int]]:
    """(sender rank, receiver rank) of every group that is needed, in order, each once."""
    return list(dict.fromkeys((stream.p_rank, stream.d_rank) for stream in streams))
