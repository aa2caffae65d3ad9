"""Who can be given work, and what model they serve: the engines by address and boot, their assets, their shared state.

It hears everything first (`EngineListener`) and passes it on to its subscribers: the cache events and the dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvferry_engine.wire.messages import Message, State
from kvferry_server.engines.assets import AssetsInvalidError, AssetStore
from kvferry_server.engines.client import EngineClient
from kvferry_server.engines.link import LinkError
from kvferry_server.requests import ModelView

logger = logging.getLogger(__name__)

_ASSETS_RETRY_S = 1.0


class EngineSubscriber(Protocol):
    """What `EngineListener` hears, after the registry has taken it in."""

    def engine_up(self, engine: EngineClient, *, same_boot: bool) -> None: ...

    def engine_lost(self, engine: EngineClient) -> None: ...

    def engine_dead(self, engine: EngineClient, boot: str, *, deliberate: bool) -> None: ...

    def engine_changed(self, engine: EngineClient) -> None: ...

    def engine_message(self, engine: EngineClient, body: Message) -> None: ...


class EngineRegistry:
    """The engines of this router. `changed` waiters wake whenever the set of usable engines may have changed."""

    def __init__(self, *, assets: AssetStore, clock: Callable[[], float]) -> None:
        self.engines: dict[str, EngineClient] = {}
        self._assets = assets
        self._clock = clock
        self._subscribers: list[EngineSubscriber] = []
        self._first_up: dict[str, float] = {}
        self._state = State(version=0)
        self._view: ModelView | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetching: set[str] = set()

    def subscribe(self, subscriber: EngineSubscriber) -> None:
        """Pass everything on to `subscriber`, after those subscribed before."""
        self._subscribers.append(subscriber)

    def add(self, engine: EngineClient) -> None:
        self.engines[engine.address] = engine

    def remove(self, engine: EngineClient) -> None:
        self.engines.pop(engine.address, None)

    def close(self) -> None:
        """Stop background fetches."""
        for task in self._tasks:
            task.cancel()

    # --- questions ----------------------------------------------------------------------------------------------------

    def usable(self) -> list[EngineClient]:
        """Return the engines that may get new work: live, assets here, service state up to date."""
        required = self._required_state_version()
        return [
            engine
            for engine in self.engines.values()
            if engine.takes_new_work and engine.state_version >= required and self._has_assets(engine)
        ]

    def why_unusable(self, engine: EngineClient) -> str:
        """Return the reason why `engine` gets no new work, empty when it does."""
        if not engine.takes_new_work:
            return "cordoned" if engine.cordoned else engine.reason or "its connection is congested"
        if engine.state_version < self._required_state_version():
            return f"service state {engine.state_version} is older than {self._required_state_version()}"
        return "" if self._has_assets(engine) else "fetching its tokenizer and templates"

    def model(self) -> ModelView | None:
        """Return the model of the newest usable engine; while all are only silent, draining or cordoned, of the newest."""
        known = [engine for engine in self.engines.values() if engine.connected and self._has_assets(engine)]
        candidates = self.usable() or known
        if not candidates:
            return None
        newest = max(candidates, key=lambda engine: (self._first_up.get(engine.boot, 0.0), engine.boot))
        info = newest.model
        assert info is not None
        bundle = self._assets.get(info.assets_digest)
        assert bundle is not None
        if self._view is None or self._view.info is not info or self._view.assets is not bundle:
            self._view = ModelView(info=info, assets=bundle)
        return self._view

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when engines have changed since the call, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _has_assets(self, engine: EngineClient) -> bool:
        return engine.model is not None and self._assets.get(engine.model.assets_digest) is not None

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- service state ------------------------------------------------------------------------------------------------

    @property
    def state_version(self) -> int:
        return self._state.version

    def publish_state(self, data: dict[str, Any]) -> int:
        """Make `data` the next version of the service state and push it to all engines; returns the version."""
        self._adopt(State(version=self._required_state_version() + 1, data=data))
        return self._state.version

    def _required_state_version(self) -> int:
        connected = (engine.state_version for engine in self.engines.values() if engine.connected)
        return max(self._state.version, max(connected, default=0))

    def _adopt(self, state: State) -> None:
        self._state = state
        for engine in self.engines.values():
            self._push_state(engine)

    def _push_state(self, engine: EngineClient) -> None:
        # The connection keeps order: what is submitted after the state is handled after it.
        if engine.state_version < self._state.version and engine.send(self._state):
            engine.state_version = self._state.version

    # --- EngineListener -----------------------------------------------------------------------------------------------

    def connected_elsewhere(self, engine: EngineClient, boot: str) -> bool:
        return any(other is not engine and other.boot == boot and other.connected for other in self.engines.values())

    def engine_up(self, engine: EngineClient, *, same_boot: bool) -> None:
        self._first_up.setdefault(engine.boot, self._clock())
        self._push_state(engine)
        for subscriber in self._subscribers:
            subscriber.engine_up(engine, same_boot=same_boot)
        self.engine_changed(engine)

    def engine_lost(self, engine: EngineClient) -> None:
        for subscriber in self._subscribers:
            subscriber.engine_lost(engine)
        self._note_change()

    def engine_dead(self, engine: EngineClient, boot: str, *, deliberate: bool) -> None:
        self._first_up.pop(boot, None)
        for subscriber in self._subscribers:
            subscriber.engine_dead(engine, boot, deliberate=deliberate)
        self._note_change()

    def engine_changed(self, engine: EngineClient) -> None:
        if engine.connected and engine.model is not None and not self._has_assets(engine):
            self._spawn_fetch(engine)
        for subscriber in self._subscribers:
            subscriber.engine_changed(engine)
        self._note_change()

    def engine_message(self, engine: EngineClient, body: Message) -> None:
        if isinstance(body, State):
            engine.state_version = max(engine.state_version, body.version)
            if body.version > self._state.version:
                self._adopt(body)
            self._note_change()
            return
        for subscriber in self._subscribers:
            subscriber.engine_message(engine, body)

    # --- assets -------------------------------------------------------------------------------------------------------

    def _spawn_fetch(self, engine: EngineClient) -> None:
        if engine.address in self._fetching:
            return
        self._fetching.add(engine.address)
        fetch: Coroutine[Any, Any, None] = self._fetch_assets(engine)
        task = asyncio.create_task(fetch)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch_assets(self, engine: EngineClient) -> None:
        try:
            while engine.connected and engine.model is not None and not self._has_assets(engine):
                digest = engine.model.assets_digest
                try:
                    await self._assets.fetch(engine, digest)
                    logger.info("assets fetched: engine=%s digest=%s", engine.name, digest)
                except (AssetsInvalidError, LinkError) as error:
                    logger.warning("assets not fetched: engine=%s digest=%s error=%s", engine.name, digest, error)
                    await asyncio.sleep(_ASSETS_RETRY_S)
        finally:
            self._fetching.discard(engine.address)
            self._note_change()
