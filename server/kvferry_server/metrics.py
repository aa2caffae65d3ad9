"""Every Prometheus metric of the router, declared in one place and frozen by a test.

Names and labels under `vllm:` are vLLM's, so that dashboards, autoscalers and gateway pickers keep working; the label
`engine` is the decode engine's name. Request metrics count this router's own requests, so sums over routers are right;
engine gauges are read at scrape time from what the engines last reported, and each router shows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry_engine.wire.messages import Counters, FinishReason, Load, ModelInfo, PromptReport

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5)) + (1e6,)
TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
HTTP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip

_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one engine last said about itself; `watch_engines` asks for these at every scrape."""

    name: str
    role: str
    usable: bool
    info: ModelInfo | None = None
    load: Load | None = None
    counters: Counters | None = None


EngineSource = Callable[[], Iterable[EngineReport]]


class RouterMetrics:
    """The metrics of one router process, on a registry of their own."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._engine_collector = _EngineCollector()
        self.registry.register(self._engine_collector)
        self._declare_requests()
        self._declare_router()
        self._declare_http()
        self._labelled: dict[tuple[str, str], _Labelled] = {}

    def _declare_requests(self) -> None:
        histogram, counter = self._histogram, self._counter
        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram("vllm:inter_token_latency_seconds", "Gaps between outputs.", ITL_BUCKETS)
        self.time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", ITL_BUCKETS
        )
        self.e2e_latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to finish.", LATENCY_BUCKETS)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Waiting in the engine.", LATENCY_BUCKETS)
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "Running in the engine, prefill and decode.", LATENCY_BUCKETS
        )
        self.prefill_time = histogram("vllm:request_prefill_time_seconds", "Filling the prompt's KV.", LATENCY_BUCKETS)
        self.decode_time = histogram("vllm:request_decode_time_seconds", "First token to finish.", LATENCY_BUCKETS)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt length.", TOKEN_BUCKETS)
        self.request_generation_tokens = histogram("vllm:request_generation_tokens", "Output length.", TOKEN_BUCKETS)
        self.params_max_tokens = histogram("vllm:request_params_max_tokens", "Asked output limit.", TOKEN_BUCKETS)
        self.max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Longest output of a request.", TOKEN_BUCKETS
        )
        self.prefill_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed, cached ones not counted.", TOKEN_BUCKETS
        )
        self.params_n = histogram("vllm:request_params_n", "Sequences of a request.", (1.0, 2.0, 5.0, 10.0, 20.0))
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of filled prompts.")
        self.prompt_tokens_by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = counter("vllm:generation_tokens", "Output tokens.")
        self.request_success = counter("vllm:request_success", "Finished sequences.", "finished_reason")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in prefix caches.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in prefix caches.")
        self.external_prefix_cache_queries = counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that a prefill engine could have filled."
        )
        self.external_prefix_cache_hits = counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens that a prefill engine filled."
        )

    def _declare_router(self) -> None:
        self.admission_rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused before queueing.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self.prompt_path = self._counter(
            "kvferry_prompt_path", "Prompts by where they were filled and why there.", "path", "reason"
        )
        self.transfer_time = self._histogram(
            "kvferry_transfer_exposed_seconds", "Waiting for ferried KV with nothing else to do.", TRANSFER_BUCKETS
        )
        self.transferred_bytes = self._counter(
            "kvferry_transferred_bytes", "KV bytes ferried for this router's requests."
        )
        self.errors = Counter(
            "kvferry_errors", "Error answers, in-stream ones included.", ("type", "status"), registry=self.registry
        )
        self.disconnects = Counter(
            "kvferry_client_disconnects", "Requests whose client left before the end.", registry=self.registry
        )
        self.requests_in_flight = Gauge(
            "kvferry_http_requests_in_flight", "Generation requests being answered.", registry=self.registry
        )

    def _declare_http(self) -> None:
        registry = self.registry
        self.http_requests = Counter(
            "http_requests", "HTTP requests by status class.", ("handler", "method", "status"), registry=registry
        )
        self.http_request_size = Summary(
            "http_request_size_bytes", "Declared size of request bodies.", ("handler",), registry=registry
        )
        self.http_response_size = Summary(
            "http_response_size_bytes", "Size of response bodies.", ("handler",), registry=registry
        )
        self.http_duration_highr = Histogram(
            "http_request_duration_highr_seconds",
            "Duration of HTTP requests, fine buckets.",
            buckets=HTTP_BUCKETS,
            registry=registry,
        )
        self.http_duration = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests by handler.",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1.0),
            registry=registry,
        )

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, _LABELS, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, (*_LABELS, *labels), registry=self.registry)

    def watch_engines(self, source: EngineSource) -> None:
        """Ask `source` for the engines at every scrape."""
        self._engine_collector.source = source

    def request(
        self, *, model: str, engine: str, received_s: float, num_prompt_tokens: int, n: int, max_tokens: int
    ) -> RequestMetrics:
        """Return the metrics of one accepted prompt. `received_s` is a time of `clock`."""
        labelled = self._labelled.get((model, engine))
        if labelled is None:
            labelled = self._labelled[model, engine] = _Labelled(self, model, engine)
        labelled.request_prompt_tokens.observe(num_prompt_tokens)
        labelled.params_max_tokens.observe(max_tokens)
        labelled.params_n.observe(n)
        return RequestMetrics(labelled, self.clock, received_s=received_s, n=n)


class _Labelled:
    """The children of the request metrics for one model and engine, looked up once."""

    def __init__(self, metrics: RouterMetrics, model: str, engine: str) -> None:
        labels = (model, engine)
        self.time_to_first_token = metrics.time_to_first_token.labels(*labels)
        self.inter_token_latency = metrics.inter_token_latency.labels(*labels)
        self.time_per_output_token = metrics.time_per_output_token.labels(*labels)
        self.e2e_latency = metrics.e2e_latency.labels(*labels)
        self.queue_time = metrics.queue_time.labels(*labels)
        self.inference_time = metrics.inference_time.labels(*labels)
        self.prefill_time = metrics.prefill_time.labels(*labels)
        self.decode_time = metrics.decode_time.labels(*labels)
        self.request_prompt_tokens = metrics.request_prompt_tokens.labels(*labels)
        self.request_generation_tokens = metrics.request_generation_tokens.labels(*labels)
        self.params_max_tokens = metrics.params_max_tokens.labels(*labels)
        self.max_generation_tokens = metrics.max_generation_tokens.labels(*labels)
        self.prefill_computed = metrics.prefill_computed.labels(*labels)
        self.params_n = metrics.params_n.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.prompt_tokens_cached = metrics.prompt_tokens_cached.labels(*labels)
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self.prefix_cache_queries = metrics.prefix_cache_queries.labels(*labels)
        self.prefix_cache_hits = metrics.prefix_cache_hits.labels(*labels)
        self.external_queries = metrics.external_prefix_cache_queries.labels(*labels)
        self.external_hits = metrics.external_prefix_cache_hits.labels(*labels)
        self.transfer_time = metrics.transfer_time.labels(*labels)
        self.transferred_bytes = metrics.transferred_bytes.labels(*labels)
        self.finished = {reason.value: metrics.request_success.labels(*labels, reason.value) for reason in FinishReason}
        self.source = {
            source: metrics.prompt_tokens_by_source.labels(*labels, source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        self._prompt_path = metrics.prompt_path
        self._labels = labels

    def count_path(self, path: str, reason: str) -> None:
        self._prompt_path.labels(*self._labels, path, reason).inc()


@dataclass(slots=True)
class _SequenceTimes:
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    finished: bool = False


class RequestMetrics:
    """Follows one prompt and its n sequences from acceptance to the end."""

    def __init__(self, labelled: _Labelled, clock: Callable[[], float], *, received_s: float, n: int) -> None:
        self._labelled = labelled
        self._clock = clock
        self._received_s = received_s
        self._accepted_s = clock()
        self._sequences = [_SequenceTimes() for _ in range(n)]
        self._report: PromptReport | None = None

    def prompt_filled(self, report: PromptReport) -> None:
        """Note where the prompt's KV came from; the first report of a request counts."""
        if self._report is not None:
            return
        self._report = report
        labelled = self._labelled
        computed = max(0, report.num_prompt_tokens - report.cached_tokens - report.remote_tokens)
        labelled.prompt_tokens.inc(report.num_prompt_tokens)
        labelled.prompt_tokens_cached.inc(report.cached_tokens)
        labelled.source["local_compute"].inc(computed)
        labelled.source["local_cache_hit"].inc(report.cached_tokens)
        labelled.source["external_kv_transfer"].inc(report.remote_tokens)
        labelled.prefix_cache_queries.inc(report.num_prompt_tokens)
        labelled.prefix_cache_hits.inc(report.cached_tokens)
        labelled.external_queries.inc(report.num_prompt_tokens - report.cached_tokens)
        labelled.external_hits.inc(report.remote_tokens)
        labelled.prefill_computed.observe(computed)
        labelled.queue_time.observe(report.queue_s)
        labelled.prefill_time.observe(report.prefill_s)
        if report.remote_tokens:
            labelled.transfer_time.observe(report.transfer_s)
            labelled.transferred_bytes.inc(report.remote_bytes)
        labelled.count_path("remote" if report.remote_tokens else "local", report.local_reason)

    def tokens(self, index: int, num_tokens: int) -> None:
        """Note new tokens of sequence `index`."""
        now = self._clock()
        times = self._sequences[index]
        labelled = self._labelled
        if times.first_s is None:
            times.first_s = now
            labelled.time_to_first_token.observe(now - self._received_s)
        else:
            labelled.inter_token_latency.observe(now - times.last_s)
        times.last_s = now
        times.num_tokens += num_tokens
        labelled.generation_tokens.inc(num_tokens)

    def finished(self, index: int, reason: str) -> None:
        """Note the end of sequence `index`."""
        now = self._clock()
        times = self._sequences[index]
        times.finished = True
        labelled = self._labelled
        labelled.finished[reason].inc()
        labelled.e2e_latency.observe(now - self._received_s)
        labelled.inference_time.observe(now - self._accepted_s)
        labelled.request_generation_tokens.observe(times.num_tokens)
        if times.first_s is not None:
            labelled.decode_time.observe(now - times.first_s)
            if times.num_tokens > 1:
                labelled.time_per_output_token.observe((now - times.first_s) / (times.num_tokens - 1))
        if all(other.finished for other in self._sequences):
            labelled.max_generation_tokens.observe(max(other.num_tokens for other in self._sequences))

    def closed(self, *, failed: bool) -> None:
        """Note that nobody reads on: sequences that still ran were aborted, or failed."""
        for index, times in enumerate(self._sequences):
            if not times.finished:
                self.finished(index, (FinishReason.ERROR if failed else FinishReason.ABORT).value)


@dataclass(slots=True, eq=False)
class _EngineCollector(Collector):
    """Turns the engines' last reports into samples at scrape time."""

    source: EngineSource = field(default=tuple)

    def describe(self) -> Iterable[Metric]:
        return self._families([])

    def collect(self) -> Iterator[Metric]:
        yield from self._families(list(self.source()))

    def _families(self, reports: list[EngineReport]) -> Iterator[Metric]:
        loaded = [
            (report, report.load, report.info)
            for report in reports
            if report.load is not None and report.info is not None
        ]
        running = _gauge("vllm:num_requests_running", "Sequences in the running batch.")
        waiting = _gauge("vllm:num_requests_waiting", "Sequences queued in the scheduler.")
        usage = _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Cache settings.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
        )
        step_age = _gauge("kvferry_engine_step_age_seconds", "Time since the engine's loop last turned.")
        for report, load, info in loaded:
            labels = (info.names[0], report.name)
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            usage.add_metric(labels, load.used_blocks / max(1, load.used_blocks + load.free_blocks))
            layout = info.layout
            config.add_metric((*labels, str(layout.block_size), str(info.num_blocks), layout.dtype), 1)
            step_age.add_metric(labels, load.step_age_s)
        up = GaugeMetricFamily("kvferry_engine_up", "1: the engine takes work.", labels=("engine", "role"))
        for report in reports:
            up.add_metric((report.name, report.role), 1 if report.usable else 0)
        yield from (running, waiting, usage, config, step_age, up)
        yield from _counter_families(reports)


_ENGINE_COUNTERS = (
    ("vllm:num_preemptions", "Sequences recomputed after a preemption.", "preemptions"),
    ("kvferry_engine_transfers_in", "Transfers into the engine.", "transfers_in"),
    ("kvferry_engine_transfers_out", "Transfers out of the engine.", "transfers_out"),
    ("kvferry_engine_transfer_failures", "Transfers that broke.", "transfer_failures"),
    ("kvferry_engine_transfer_bytes_in", "KV bytes received.", "transfer_bytes_in"),
    ("kvferry_engine_transfer_bytes_out", "KV bytes sent.", "transfer_bytes_out"),
    ("kvferry_engine_tombstones", "Payloads that were cancelled on the way.", "tombstones"),
    ("kvferry_engine_corrupt_chunks", "Payloads with a wrong checksum.", "corrupt_chunks"),
    ("kvferry_engine_leaked_blocks", "Blocks the auditor found without an owner.", "leaked_blocks"),
    ("kvferry_engine_steps", "Forward passes.", "steps"),
)


def _counter_families(reports: list[EngineReport]) -> Iterator[Metric]:
    for name, help, attribute in _ENGINE_COUNTERS:
        family = CounterMetricFamily(name, help, labels=_LABELS)
        for report in reports:
            if report.counters is not None and report.info is not None:
                family.add_metric((report.info.names[0], report.name), getattr(report.counters, attribute))
        yield family


def _gauge(name: str, help: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, labels=_LABELS)
