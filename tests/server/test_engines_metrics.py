"""What a scrape shows of engines and routing."""

from __future__ import annotations

from prometheus_client import generate_latest

from kvferry_engine.wire.messages import Counters, Load
from kvferry_server.engines.metrics_collector import RoutingCollector, engine_reports
from kvferry_server.metrics import RouterMetrics
from server.kit_engine import FakeEngine, collect, in_background, running, tokens_of, until


def scrape(metrics: RouterMetrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_engines_and_moves_are_counted() -> None:
    async with running(FakeEngine("a"), FakeEngine("b")) as router:
        metrics = RouterMetrics()
        metrics.watch_engines(lambda: engine_reports(router.core.registry))
        metrics.registry.register(RoutingCollector(router.core))
        generation = await router.core.dispatcher.submit(router.request(seeds=[9], max_tokens=200))
        here = next(engine for engine in router.engines if engine.name == generation.decode_engine)
        other = next(engine for engine in router.engines if engine is not here)
        reading = in_background(collect(generation))
        await until(lambda: any(len(sequence.emitted) > 10 for sequence in here.sequences.values()))
        await here.crash()
        assert await reading == {0: tokens_of(9, 200)}
        other.load = Load(num_running=5, num_waiting=2, used_blocks=250, free_blocks=750)
        await until(lambda: router.client(other).load.num_running == 5)
        router.client(other).counters = Counters(preemptions=3)
        values = scrape(metrics)
        labels = f'{{engine="{other.name}",model_name="tiny"}}'
        assert values[f"vllm:num_requests_running{labels}"] == 5
        assert values[f"vllm:kv_cache_usage_perc{labels}"] == 0.25
        assert values[f"vllm:num_preemptions_total{labels}"] == 3
        assert values[f'kvferry_engine_up{{engine="{here.name}",role="both"}}'] == 0
        assert values['kvferry_request_moves_total{cause="death"}'] == 1
        assert values['kvferry_routing_decisions_total{path="local",reason="short"}'] == 2
        assert values["kvferry_requests_on_engines"] == 0


async def test_a_refused_request_is_told_to_whoever_counts() -> None:
    refused: list[str] = []
    engine = FakeEngine("a")
    async with running(engine, max_queued_tokens=10, on_refused=refused.append) as router:
        engine.load = Load(waiting_tokens=50)
        await until(lambda: router.core.load_book.view(engine.boot).waiting_tokens == 50)
        try:
            await router.core.dispatcher.submit(router.request())
        except Exception as error:
            assert getattr(error, "status", None) == 429
        assert refused == ["max_num_queued_tokens"]
