"""Puts the engine-facing half of a router together: connections, registry, index, load book, dispatcher.

The one place that knows all parts; `main` builds it from settings, tests build it with their own timings and resolver.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry_engine.wire.sockets import WireKeys
from kvferry_server.engines.assets import AssetStore
from kvferry_server.engines.client import RouterIdentity
from kvferry_server.engines.discovery import Resolver, Sources, resolve
from kvferry_server.engines.fleet import Fleet
from kvferry_server.engines.link import KeyRing, Link, ZmqContext, open_link
from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.engines.timings import LinkTimings
from kvferry_server.routing.admission import QueueLimits
from kvferry_server.routing.cache_events import CacheEvents
from kvferry_server.routing.chooser import Chooser
from kvferry_server.routing.dispatcher import Dispatcher
from kvferry_server.routing.load_book import LoadBook
from kvferry_server.routing.placement import PlacementLimits
from kvferry_server.routing.policies import make_policy
from kvferry_server.routing.prefix_index import PrefixIndex
from kvferry_server.routing.stats import RoutingStats
from kvferry_server.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCore:
    """The parts that others read; `start` on the event loop, `close` at the end."""

    fleet: Fleet
    registry: EngineRegistry
    dispatcher: Dispatcher
    prefix_index: PrefixIndex
    cache_events: CacheEvents
    load_book: LoadBook
    stats: RoutingStats

    def start(self) -> None:
        self.fleet.start()

    async def close(self) -> None:
        """Abort what runs, say BYE, drop the connections."""
        await self.dispatcher.close()
        await self.fleet.close()


def build_core(
    settings: RouterSettings,
    *,
    sources: Sources,
    identity: RouterIdentity,
    context: ZmqContext,
    keys: Sequence[WireKeys] = (),
    clock: Callable[[], float] = time.monotonic,
    timings: LinkTimings | None = None,
    resolver: Resolver = resolve,
    randomness: random.Random | None = None,
    on_refused: Callable[[str], None] = lambda limit: None,
) -> RouterCore:
    """Build all parts; nothing runs before `start`. `on_refused` hears the limit of every request refused by admission."""
    registry = EngineRegistry(assets=AssetStore(), clock=clock)
    prefix_index = PrefixIndex()
    cache_events = CacheEvents(prefix_index, clock)
    load_book = LoadBook()
    stats = RoutingStats()

    rings: dict[str, KeyRing] = {}

    async def dial(address: str, timeout_s: float) -> Link:
        ring = rings.setdefault(address, KeyRing(keys))
        return await open_link(context, address, identity=identity.boot.encode(), ring=ring, timeout_s=timeout_s)

    fleet = Fleet(
        sources,
        registry=registry,
        identity=identity,
        dial=dial,
        clock=clock,
        timings=timings or LinkTimings(),
        resolver=resolver,
    )
    chooser = Chooser(
        registry=registry,
        load_book=load_book,
        prefix_index=prefix_index,
        policy=make_policy(settings.policy, randomness or random.Random()),
        mode=settings.disaggregation,
    )
    dispatcher = Dispatcher(
        registry=registry,
        chooser=chooser,
        load_book=load_book,
        stats=stats,
        queue_limits=QueueLimits(
            max_queued_requests=settings.max_queued_requests, max_queued_tokens=settings.max_queued_tokens
        ),
        placement_limits=PlacementLimits(
            submit_s=settings.submit_timeout,
            accept_s=settings.submit_timeout / 2,
            resume_s=settings.resume_wait,
            on_prefill_unavailable=settings.on_prefill_unavailable,
        ),
        router_boot=identity.boot,
        clock=clock,
        on_refused=on_refused,
    )
    registry.subscribe(cache_events)
    registry.subscribe(dispatcher)
    return RouterCore(
        fleet=fleet,
        registry=registry,
        dispatcher=dispatcher,
        prefix_index=prefix_index,
        cache_events=cache_events,
        load_book=load_book,
        stats=stats,
    )
