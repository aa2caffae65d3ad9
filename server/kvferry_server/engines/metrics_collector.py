"""What engines and routing tell Prometheus: the engines' last reports, and the counts of `routing.stats` at scrape time.

`main` registers both: the reports through `RouterMetrics.watch_engines`, the counts as a collector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.metrics import EngineReport
from kvferry_server.routing.core import RouterCore


def engine_reports(registry: EngineRegistry) -> list[EngineReport]:
    """Return what every known engine last said; engines that never said HELLO have no model, load or counters."""
    usable = set(registry.usable())
    reports = {}
    for engine in registry.engines.values():
        greeted = engine.connected and engine.hello is not None
        # By name: two addresses of one engine, or a dead one beside its successor, must not make a series twice.
        if engine.name in reports and not greeted:
            continue
        reports[engine.name] = EngineReport(
            name=engine.name,
            role=engine.role,
            usable=engine in usable,
            info=engine.model if greeted else None,
            load=engine.load if greeted else None,
            counters=engine.counters if greeted else None,
        )
    return list(reports.values())


class RoutingCollector(Collector):
    """The counts of one router core as `kvferry_*` metrics."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """Yield all families, empty ones too, so that names exist from the start."""
        stats = self._core.stats
        yield _counters(
            "kvferry_routing_decisions",
            "Submissions by where the prompt should come from.",
            ("reason", "path"),
            {(reason, path): count for (reason, path), count in stats.decisions.items()},
        )
        yield _counters(
            "kvferry_submissions_not_accepted",
            "Submissions an engine did not accept, by code.",
            ("why",),
            {(why,): count for why, count in stats.rejections.items()},
        )
        yield _counters(
            "kvferry_request_moves",
            "Running requests continued on another engine.",
            ("cause",),
            {(cause.value,): count for cause, count in stats.moves.items()},
        )
        for name, help, value in (
            ("kvferry_requests_lost", "Running requests no engine could continue.", stats.num_failed),
            ("kvferry_sequences_resumed_in_place", "Sequences resumed after a reconnect.", stats.num_resumed_in_place),
            ("kvferry_duplicate_tokens", "Tokens that arrived again and were dropped.", stats.num_duplicate_tokens),
            ("kvferry_token_gaps", "Missing tokens that were asked for again.", stats.num_gaps),
            ("kvferry_stray_step_rows", "STEP rows of submissions that are over.", stats.num_stray_rows),
            ("kvferry_cache_event_gaps", "Gaps in the engines' cache events.", self._core.cache_events.num_gaps),
        ):
            yield CounterMetricFamily(name, help, value=value)
        yield GaugeMetricFamily(
            "kvferry_requests_on_engines", "Requests submitted and not over.", value=self._core.dispatcher.num_in_flight
        )
        yield GaugeMetricFamily(
            "kvferry_prefix_index_blocks", "Distinct blocks in the prefix index.", value=len(self._core.prefix_index)
        )


def _counters(
    name: str, help: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=labels)
    for values, count in counts.items():
        family.add_metric([str(value) for value in values], count)
    return family
