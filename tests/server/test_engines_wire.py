"""The router's connection against the engine's real network thread: greeting, secrets, rotation, BYE, restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry_engine.network import Network, PeerDown, PeerUp
from kvferry_engine.wire.messages import Beat, Hello, Load, PeerKind, Role
from kvferry_engine.wire.sockets import derive_keys
from kvferry_server.engines.client import EngineClient, EngineState
from kvferry_server.engines.discovery import Sources
from server.kit_engine import Harness, model_info, running, until

CURRENT, PREVIOUS = b"current secret 16 bytes", b"previous secret 16 bytes"


@contextmanager
def engine_network(boot: str, *, port: int = 0, secrets: list[bytes] | None = None) -> Iterator[Network]:
    """A network thread without an engine behind it."""
    network = Network(
        hello=lambda: Hello(kind=PeerKind.ENGINE, boot=boot, name="real", role=Role.DECODE, model=model_info()),
        beat=lambda: Beat(load=Load(num_running=3), role=Role.DECODE),
        boot=boot,
        host="127.0.0.1",
        port=port,
        secrets=secrets or [],
        clock=time.monotonic,
    )
    network.start()
    try:
        yield network
    finally:
        network.close(flush_s=0.1)


def client_of(router: Harness) -> EngineClient:
    return next(iter(router.core.registry.engines.values()))


async def test_both_sides_meet_and_load_arrives() -> None:
    with engine_network("boot-1") as network:
        sources = Sources(frozenset({f"127.0.0.1:{network.port}"}))
        async with running(sources=sources, usable=0) as router:
            client = client_of(router)
            await until(lambda: client.state is EngineState.LIVE and client.load.num_running == 3)
            up = network.inbox.get(timeout=5)
            assert isinstance(up, PeerUp) and up.boot == router.boot
            await until(lambda: network.inbox.qsize() > 0)
        items = [network.inbox.get(timeout=5) for _ in range(network.inbox.qsize())]
        assert any(isinstance(item, PeerDown) for item in items)


async def test_bye_ends_the_boot_and_a_new_process_on_the_port_begins_another() -> None:
    first = engine_network("boot-1")
    port = first.__enter__().port
    async with running(sources=Sources(frozenset({f"127.0.0.1:{port}"})), usable=0) as router:
        client = client_of(router)
        await until(lambda: client.boot == "boot-1")
        await asyncio.to_thread(first.__exit__, None, None, None)
        await until(lambda: client.state is EngineState.GONE)
        with engine_network("boot-2", port=port):
            await until(lambda: client.boot == "boot-2")
            assert client.state is EngineState.LIVE


@pytest.mark.parametrize(
    ("engine", "router_keys", "connects"),
    [
        ([CURRENT], [CURRENT], True),
        ([PREVIOUS], [CURRENT, PREVIOUS], True),
        ([CURRENT, PREVIOUS], [CURRENT], True),
        ([PREVIOUS], [CURRENT], False),
        ([CURRENT], [], False),
    ],
)
async def test_secrets_decide_who_connects(engine: list[bytes], router_keys: list[bytes], connects: bool) -> None:
    with engine_network("boot-1", secrets=engine) as network:
        sources = Sources(frozenset({f"127.0.0.1:{network.port}"}))
        keys = tuple(derive_keys(secret) for secret in router_keys)
        async with running(sources=sources, usable=0, keys=keys) as router:
            client = client_of(router)
            if connects:
                await until(lambda: client.connected)
            else:
                await until(lambda: "secret" in client.reason)
                assert not client.connected
