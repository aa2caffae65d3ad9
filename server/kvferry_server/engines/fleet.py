"""Keeps one client task per discovered address, and speaks to all engines at once for admin operations.

Discovery proposes addresses, the registry knows what became of them; this file only starts and stops clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kvferry_engine.wire.messages import AdminResult, Role
from kvferry_server.engines.client import EngineClient, RouterIdentity
from kvferry_server.engines.discovery import AddressBook, NameWatcher, Resolver, Sources, resolve
from kvferry_server.engines.link import Link
from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.engines.timings import LinkTimings

logger = logging.getLogger(__name__)


class Fleet:
    """All engine connections of a router. `start` on the event loop, `close` at the end."""

    def __init__(
        self,
        sources: Sources,
        *,
        registry: EngineRegistry,
        identity: RouterIdentity,
        dial: Callable[[str, float], Awaitable[Link]],
        clock: Callable[[], float],
        timings: LinkTimings,
        resolver: Resolver = resolve,
        review_interval_s: float = 1.0,
    ) -> None:
        self.registry = registry
        self._sources = sources
        self._identity = identity
        self._dial = dial
        self._clock = clock
        self._timings = timings
        self._resolver = resolver
        self._review_interval_s = review_interval_s
        self._book = AddressBook(sources.addresses)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watchers: list[NameWatcher] = []
        self._reviewer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to resolve and dial; returns at once."""
        loop = asyncio.get_running_loop()

        def report(name: tuple[str, int], addresses: list[str]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._answered, name, addresses)

        for name in sorted(self._sources.names):
            watcher = NameWatcher(name, report, resolver=self._resolver)
            self._watchers.append(watcher)
            watcher.start()
        self.review()
        self._reviewer = asyncio.create_task(self._review_often())

    async def close(self) -> None:
        """Say BYE to all engines and drop the connections."""
        for watcher in self._watchers:
            watcher.stop()
        tasks = [*self._tasks.values()]
        if self._reviewer is not None:
            tasks.append(self._reviewer)
        for engine in list(self.registry.engines.values()):
            engine.close("the router stops")
        # One turn of the loop, so that libzmq's thread gets the BYEs before the sockets close.
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self.registry.close()

    def _answered(self, name: tuple[str, int], addresses: list[str]) -> None:
        self._book.answered(name, addresses)
        self.review()

    async def _review_often(self) -> None:
        while True:
            await asyncio.sleep(self._review_interval_s)
            self.review()

    def review(self) -> None:
        """Make the clients match the addresses that are wanted now."""
        engines = self.registry.engines
        connected = frozenset(address for address, engine in engines.items() if engine.connected)
        wanted = self._book.wanted(connected, self._clock())
        for address in wanted - engines.keys():
            self._add(address)
        for address in engines.keys() - wanted:
            self._forget(engines[address])

    def _add(self, address: str) -> None:
        engine = EngineClient(
            address,
            identity=self._identity,
            dial=self._dial,
            listener=self.registry,
            timings=self._timings,
            clock=self._clock,
        )
        self.registry.add(engine)
        self._tasks[address] = asyncio.create_task(engine.run(), name=f"engine-{address}")

    def _forget(self, engine: EngineClient) -> None:
        logger.info("engine address forgotten: engine=%s address=%s", engine.name, engine.address)
        engine.close("its address is gone")
        self.registry.remove(engine)
        self._tasks.pop(engine.address).cancel()

    # --- admin --------------------------------------------------------------------------------------------------------

    async def admin(self, operation: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, AdminResult]:
        """Run an ADMIN operation on every known engine at the same time; results by engine name, failures included."""
        engines = list(self.registry.engines.values())
        results = await asyncio.gather(*(engine.admin(operation, arguments, timeout_s) for engine in engines))
        return _by_name(engines, results)

    async def set_role(self, roles: dict[str, Role], timeout_s: float) -> dict[str, AdminResult]:
        """Set the roles of engines given by name or address; results by the key given."""
        found = {
            key: engine
            for key in roles
            for engine in self.registry.engines.values()
            if key in (engine.name, engine.address)
        }
        results = await asyncio.gather(*(engine.set_role(roles[key], timeout_s) for key, engine in found.items()))
        answers = dict(zip(found, results, strict=True))
        for key in roles.keys() - found.keys():
            answers[key] = AdminResult(id=key, ok=False, message=f"no engine is called {key}")
        return answers


def _by_name(engines: list[EngineClient], results: list[AdminResult]) -> dict[str, AdminResult]:
    """Return results by engine name, by name@address where two engines share a name."""
    names = [engine.name for engine in engines]
    return {
        (engine.name if names.count(engine.name) == 1 else f"{engine.name}@{engine.address}"): result
        for engine, result in zip(engines, results, strict=True)
    }
