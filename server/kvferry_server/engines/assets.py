"""Fetches what the router needs of a model (tokenizer, templates, config) from engines, by digest, and keeps it.

Each piece is asked for in turn, so a large bundle never fills a socket; the whole is verified against its digest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

import msgspec

from kvferry_engine.wire.assets import AssetBundle, decode_bundle
from kvferry_engine.wire.messages import Assets

MAX_BUNDLE_BYTES = 1 << 30


class AssetsInvalidError(Exception):
    """An engine sent pieces that do not make the bundle its HELLO promised."""


class AssetSource(Protocol):
    """Where pieces come from: `EngineClient`."""

    async def fetch_piece(self, digest: str, offset: int) -> Assets: ...


class AssetStore:
    """Bundles by digest; one fetch at a time per digest, the `max_bundles` most recently used are kept."""

    def __init__(self, max_bundles: int = 4) -> None:
        self._bundles: OrderedDict[str, AssetBundle] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._max_bundles = max_bundles

    def get(self, digest: str) -> AssetBundle | None:
        """Return the bundle if it is here."""
        bundle = self._bundles.get(digest)
        if bundle is not None:
            self._bundles.move_to_end(digest)
        return bundle

    async def fetch(self, source: AssetSource, digest: str) -> AssetBundle:
        """Return the bundle, fetched from `source` if need be. Raises AssetsInvalidError, LinkError."""
        async with self._locks.setdefault(digest, asyncio.Lock()):
            bundle = self.get(digest)
            if bundle is None:
                bundle = await _download(source, digest)
                self._bundles[digest] = bundle
                while len(self._bundles) > self._max_bundles:
                    self._locks.pop(self._bundles.popitem(last=False)[0], None)
            return bundle


async def _download(source: AssetSource, digest: str) -> AssetBundle:
    data = bytearray()
    while True:
        piece = await source.fetch_piece(digest, len(data))
        data += piece.data
        if piece.total_bytes > MAX_BUNDLE_BYTES or len(data) > piece.total_bytes:
            raise AssetsInvalidError(f"asset bundle {digest} has {max(len(data), piece.total_bytes)} bytes")
        if len(data) == piece.total_bytes:
            break
        if not piece.data:
            raise AssetsInvalidError(f"asset bundle {digest} ends at byte {len(data)} of {piece.total_bytes}")
    try:
        return await asyncio.to_thread(decode_bundle, digest, bytes(data))
    except (ValueError, msgspec.DecodeError) as error:
        raise AssetsInvalidError(str(error)) from error
