"""One engine connection: greeting, silence, loss, refusal, secrets, pieces of assets, admin calls."""

from __future__ import annotations

import asyncio
import threading

import pytest
import zmq
from zmq.utils import z85

from kvferry_engine.wire import sockets
from kvferry_engine.wire.messages import Beat, Bye, Envelope, Hello, PeerKind, Role
from kvferry_server.engines.client import EngineState
from kvferry_server.engines.timings import LinkTimings, Silence, Verdict, backoff_s
from server.kit_engine import BUNDLE, FakeEngine, in_background, model_info, running, until

TIMINGS = LinkTimings(beat_s=0.5, suspect_s=2.0, dead_s=8.0)


@pytest.mark.parametrize(
    ("silent_s", "verdict"),
    [(0.0, Verdict.ALIVE), (1.9, Verdict.ALIVE), (2.0, Verdict.SUSPECT), (7.9, Verdict.SUSPECT), (8.0, Verdict.DEAD)],
)
def test_silence_makes_an_engine_suspect_then_dead(silent_s: float, verdict: Verdict) -> None:
    silence = Silence(TIMINGS, 100.0)
    now = 100.0
    while now + 0.5 < 100.0 + silent_s:
        now += 0.5
        silence.tick(now)
    assert silence.tick(100.0 + silent_s) is verdict


def test_time_in_which_the_router_itself_stood_still_is_forgiven() -> None:
    silence = Silence(TIMINGS, 0.0)
    assert silence.tick(20.0) is Verdict.ALIVE


def test_a_word_ends_the_silence() -> None:
    silence = Silence(TIMINGS, 0.0)
    for tick in range(1, 9):
        silence.tick(tick * 0.5)
    silence.heard(4.0)
    assert silence.tick(4.5) is Verdict.ALIVE


def test_the_first_redial_is_at_once_and_later_ones_wait_longer() -> None:
    assert [backoff_s(TIMINGS, n) for n in range(7)] == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


async def test_hello_tells_both_sides_who_the_other_is() -> None:
    async with running(FakeEngine("a", role=Role.DECODE)) as router:
        client = router.client(router.engines[0])
        assert (client.state, client.name, client.role) == (EngineState.LIVE, "a", Role.DECODE)
        assert client.boot == router.engines[0].boot
        greeting = router.engines[0].got(Hello)[0]
        assert (greeting.kind, greeting.boot) == (PeerKind.ROUTER, router.boot)


async def test_beats_go_both_ways_and_carry_load_role_and_cordon() -> None:
    async with running(FakeEngine("a")) as router:
        engine, client = router.engines[0], router.client(router.engines[0])
        engine.load.num_running = 7
        engine.role = Role.PREFILL
        await until(lambda: client.load.num_running == 7 and client.role is Role.PREFILL)
        engine.cordoned = True
        await until(lambda: not router.core.registry.usable())
        assert router.core.registry.why_unusable(client) == "cordoned"
        engine.cordoned = False
        await router.usable(1)


async def test_a_closed_connection_is_dead_at_once_and_redialled() -> None:
    async with running(FakeEngine("a")) as router:
        engine, client = router.engines[0], router.client(router.engines[0])
        await engine.crash()
        await until(lambda: client.state is EngineState.DEAD)
        assert "silent" not in client.reason
        await engine.start()
        await router.usable(1)
        assert client.boot == engine.boot


async def test_bye_is_gone() -> None:
    async with running(FakeEngine("a")) as router:
        client = router.client(router.engines[0])
        await router.engines[0].leave()
        await until(lambda: client.state is EngineState.GONE)
        assert client.boot == ""


async def test_a_draining_engine_gets_no_new_work() -> None:
    async with running(FakeEngine("a")) as router:
        client = router.client(router.engines[0])
        router.engines[0].drain()
        await until(lambda: client.state is EngineState.DRAINING)
        assert router.core.registry.usable() == []


async def test_an_engine_of_another_service_is_refused() -> None:
    async with running(FakeEngine("a", service="ns/x/1"), service="ns/y/2", usable=0) as router:
        client = router.client(router.engines[0])
        await until(lambda: "ns/x/1" in client.reason)
        assert not client.connected


async def test_an_engine_of_the_same_or_no_service_is_taken() -> None:
    async with running(FakeEngine("a", service="ns/x/1"), FakeEngine("b"), service="ns/x/1"):
        pass


async def test_an_engine_with_other_wire_versions_is_refused() -> None:
    engine = FakeEngine("a")
    engine.version = (7, 9)
    async with running(engine, usable=0) as router:
        await until(lambda: "7..9" in router.client(engine).reason)


async def test_an_engine_that_is_still_loading_is_connected_but_not_usable() -> None:
    engine = FakeEngine("a")
    info, engine.info = engine.info, None  # type: ignore[assignment]
    engine.load.free_blocks = 0
    async with running(engine, usable=0) as router:
        client = router.client(engine)
        await until(lambda: client.connected)
        assert router.core.registry.why_unusable(client) == "loading its model"
        engine.info = info
        engine.broadcast(engine.hello())
        await router.usable(1)


async def test_messages_from_another_boot_or_out_of_order_are_dropped() -> None:
    async with running(FakeEngine("a")) as router:
        client = router.client(router.engines[0])
        before = client.num_stray
        late = Envelope(src="somebody", dst=router.boot, seq=10_000, body=Bye())
        repeated = Envelope(src=client.boot, dst=router.boot, seq=0, body=Bye())
        for envelope in (late, repeated):
            client._handle(envelope)
        assert client.num_stray == before + 2
        assert client.state is EngineState.LIVE


async def test_a_message_nobody_understands_is_dropped() -> None:
    async with running(FakeEngine("a")) as router:
        engine, client = router.engines[0], router.client(router.engines[0])
        assert engine._socket is not None
        await engine._socket.send_multipart([router.boot.encode(), b"\xc1nonsense"])
        await until(lambda: client.num_stray == 1)
        assert client.state is EngineState.LIVE


async def test_assets_come_in_pieces_and_are_fetched_once() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        view = router.core.dispatcher.model()
        assert view is not None
        assert view.assets.tokenizer_json == BUNDLE.tokenizer_json
        assert view.info.names == ["tiny"]


async def test_assets_that_do_not_match_their_digest_are_not_used() -> None:
    engine = FakeEngine("a")
    engine.script.corrupt_assets = True
    async with running(engine, usable=0) as router:
        await until(lambda: len(engine.received) > 7)
        await asyncio.sleep(0.02)
        assert router.core.registry.usable() == []
        engine.script.corrupt_assets = False
        await router.usable(1)


def admit_only(engine: FakeEngine, keys: sockets.WireKeys, stop: threading.Event) -> threading.Thread:
    """A ZAP handler that admits one key, as engines have."""
    handler: zmq.Socket[bytes] = zmq.Context.shadow(engine._context.underlying).socket(zmq.REP)
    handler.bind("inproc://zeromq.zap.01")

    def serve() -> None:
        while not stop.is_set():
            if handler.poll(20):
                parts = handler.recv_multipart()
                allowed = parts[6] == z85.decode(keys.public)
                handler.send_multipart([parts[0], parts[1], b"200" if allowed else b"400", b"", b"", b""])
        handler.close(linger=0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


async def test_the_right_secret_connects_and_a_wrong_one_does_not() -> None:
    right, wrong = sockets.derive_keys(b"right secret 16 bytes"), sockets.derive_keys(b"wrong secret 16 bytes")
    engine = FakeEngine("a", keys=right)
    stop = threading.Event()
    thread = admit_only(engine, right, stop)
    try:
        await engine.start()
        async with running(FakeEngine("b"), keys=(right,), usable=0) as router:
            await until(lambda: "secret" in router.client(router.engines[0]).reason)
        kept = engine.close
        engine.close = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        async with running(engine, start=False, keys=(right,)):
            pass
        async with running(engine, start=False, keys=(wrong, right)):
            pass
        for keys in ((wrong,), ()):
            async with running(engine, start=False, keys=keys, usable=0) as router:
                await until(lambda router=router: "secret" in router.client(engine).reason)
                assert not router.client(engine).connected
    finally:
        stop.set()
        thread.join()
        await kept()


async def test_admin_calls_reach_every_engine_and_report_each() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        router.engines[1].freeze()
        results = await router.core.fleet.admin("pause", {"mode": "keep"}, timeout_s=0.2)
        assert results["a"].ok and results["a"].data == {"mode": "keep"}
        assert not results["b"].ok and "no answer" in results["b"].message


async def test_set_role_returns_once_the_engine_tells_its_new_role() -> None:
    async with running(FakeEngine("a")) as router:
        results = await router.core.fleet.set_role({"a": Role.PREFILL, "nobody": Role.DECODE}, timeout_s=2.0)
        assert results["a"].ok and router.client(router.engines[0]).role is Role.PREFILL
        assert not results["nobody"].ok


async def test_service_state_reaches_laggards_and_gates_work() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        router.engines[1].freeze()
        assert router.core.registry.publish_state({"paused": True}) == 1
        await until(lambda: [e.name for e in router.core.registry.usable()] == ["a"])
        router.engines[1].thaw()
        await router.usable(2)
        assert [engine.state_version for engine in router.engines] == [1, 1]


async def test_an_engine_behind_the_highest_state_version_gets_no_work() -> None:
    ahead, behind = FakeEngine("ahead"), FakeEngine("behind")
    ahead.state_version = 4
    async with running(ahead, behind, usable=1) as router:
        assert [engine.name for engine in router.core.registry.usable()] == ["ahead"]
        assert "older than 4" in router.core.registry.why_unusable(router.client(behind))


async def test_two_addresses_of_one_engine_make_one_usable_engine() -> None:
    engine = FakeEngine("a")
    await engine.start()
    from kvferry_server.engines.discovery import Sources

    both = Sources(frozenset({engine.address, engine.address.replace("127.0.0.1", "127.0.0.2")}))
    relay = in_background(_relay(engine.port))
    await asyncio.sleep(0.02)
    async with running(engine, start=False, sources=both, usable=1) as router:
        await until(lambda: any("another address" in e.reason for e in router.core.registry.engines.values()))
        await router.usable(1)
        generation = await router.core.dispatcher.submit(router.request(max_tokens=30))
        assert len([event async for event in generation.events()]) > 0
        await generation.aclose()
    relay.cancel()


async def _relay(port: int) -> None:
    """Forward 127.0.0.2:port to 127.0.0.1:port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(accepted, "127.0.0.2", port)
    async with server:
        await server.serve_forever()


async def test_a_full_socket_keeps_messages_at_the_sender_in_order() -> None:
    from kvferry_server.engines.link import Link

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = context.socket(zmq.ROUTER)
    sockets.prepare(receiver)
    receiver.setsockopt(zmq.RCVHWM, 10)
    receiver.setsockopt(zmq.RCVBUF, 4096)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, f"127.0.0.1:{port}", identity=b"x", keys=None)
    link._plain.setsockopt(zmq.SNDHWM, 10)
    link._plain.setsockopt(zmq.SNDBUF, 4096)
    await link.open(2.0)
    flushing = in_background(link.flush())
    payload = bytes(20_000)
    for number in range(300):
        link.send(number.to_bytes(4, "little") + payload)
    assert link.num_unsent > 0
    numbers = await asyncio.to_thread(
        lambda: [int.from_bytes(receiver.recv_multipart()[1][:4], "little") for _ in range(300)]
    )
    assert numbers == list(range(300))
    assert link.num_unsent == 0
    flushing.cancel()
    link.close()
    receiver.close(linger=0)
    context.term()


def test_a_beat_is_small() -> None:
    from kvferry_engine.wire.messages import encode

    assert len(encode(Envelope(src="a" * 32, dst="b" * 32, seq=1, body=Beat()))) < 100


async def test_models_of_two_rollouts_show_the_newest() -> None:
    old, new = FakeEngine("old"), FakeEngine("new", info=model_info(names=["v2"], output_hash="v2"))
    await old.start()
    async with running(old, new, start=False, usable=1) as router:
        await new.start()
        old_port_view = router.core.dispatcher.model()
        assert old_port_view is not None and old_port_view.info.names == ["tiny"]
    await new.close()
