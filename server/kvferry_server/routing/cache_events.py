"""Applies the EVENTS of all engines to the prefix index and asks for a snapshot where the stream has a gap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvferry_engine.wire.messages import Events, EventsSnapshot, Message
from kvferry_server.engines.client import EngineClient
from kvferry_server.routing.prefix_index import PrefixIndex, split_hashes

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER_S = 5.0


@dataclass(slots=True)
class _Stream:
    """Where one engine's events stand; `next_number` None: waiting for a snapshot asked for at `asked_s`."""

    next_number: int | None
    asked_s: float


class CacheEvents:
    """Subscriber of the registry. Every connection starts with a snapshot: what was sent while we were away is lost."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self.num_gaps = 0

    def engine_up(self, engine: EngineClient, *, same_boot: bool) -> None:
        self._ask(engine)

    def engine_lost(self, engine: EngineClient) -> None:
        self._streams.pop(engine.boot, None)

    def engine_dead(self, engine: EngineClient, boot: str, *, deliberate: bool) -> None:
        self._streams.pop(boot, None)
        self._index.remove_engine(boot)

    def engine_changed(self, engine: EngineClient) -> None:
        """States do not matter here: a suspect engine keeps its blocks."""

    def engine_message(self, engine: EngineClient, body: Message) -> None:
        if not isinstance(body, Events):
            return
        try:
            self._apply(engine, body)
        except ValueError as error:
            logger.warning("cache events not understood: engine=%s error=%s", engine.name, error)
            self._ask(engine)

    def _apply(self, engine: EngineClient, events: Events) -> None:
        stream = self._streams.get(engine.boot)
        if stream is None:
            return
        if events.snapshot:
            self._index.replace(engine.boot, split_hashes(events.stored))
        elif stream.next_number is None:
            if self._clock() - stream.asked_s > ASK_AGAIN_AFTER_S:
                self._ask(engine)
            return
        elif events.number != stream.next_number:
            self.num_gaps += 1
            logger.warning(
                "cache events missing: engine=%s expected=%d got=%d", engine.name, stream.next_number, events.number
            )
            self._ask(engine)
            return
        else:
            self._index.removed(engine.boot, split_hashes(events.removed))
            self._index.stored(engine.boot, split_hashes(events.stored))
        stream.next_number = events.number + 1

    def _ask(self, engine: EngineClient) -> None:
        self._streams[engine.boot] = _Stream(next_number=None, asked_s=self._clock())
        engine.send(EventsSnapshot())
