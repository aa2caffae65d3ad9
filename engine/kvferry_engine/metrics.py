"""Prometheus metrics of one engine, read from its totals at scrape time; the hot path only adds integers.

vLLM's names (`vllm:*`) where they have a meaning here, so that dashboards work; `kvferry_*` for transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry_engine.wire.messages import Counters, Load

Snapshot = Callable[[], tuple[Load, Counters]]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: its name, whether it is a counter, its sentence, and how to read it."""

    name: str
    is_counter: bool
    help: str
    read: Callable[[Load, Counters], float]


def _usage(load: Load, _: Counters) -> float:
    total = load.used_blocks + load.free_blocks
    return load.used_blocks / total if total else 0.0


ROWS: tuple[MetricRow, ...] = (
    MetricRow("vllm:num_requests_running", False, "Sequences in the running batch.", lambda load, _: load.num_running),
    MetricRow("vllm:num_requests_waiting", False, "Sequences waiting for a place.", lambda load, _: load.num_waiting),
    MetricRow("vllm:kv_cache_usage_perc", False, "Share of KV blocks in use, 0..1.", _usage),
    MetricRow(
        "kvferry_staging_slots_used", False, "Staging slots with a payload.", lambda load, _: load.staging_slots_used
    ),
    MetricRow(
        "vllm:prompt_tokens",
        True,
        "Prompt tokens of prompts that were filled, cached ones included.",
        lambda _, c: c.prompt_tokens,
    ),
    MetricRow("vllm:generation_tokens", True, "Output tokens.", lambda _, c: c.generation_tokens),
    MetricRow(
        "vllm:num_preemptions",
        True,
        "Sequences that lost their blocks and were computed again.",
        lambda _, c: c.preemptions,
    ),
    MetricRow(
        "vllm:prefix_cache_queries", True, "Tokens looked up in the prefix cache.", lambda _, c: c.prefix_queries
    ),
    MetricRow("vllm:prefix_cache_hits", True, "Tokens found in the prefix cache.", lambda _, c: c.prefix_hits),
    MetricRow(
        "kvferry_prompt_tokens_computed",
        True,
        "Prompt tokens computed on this engine, for itself or for others.",
        lambda _, c: c.prompt_tokens_local_compute,
    ),
    MetricRow(
        "kvferry_prompt_tokens_ferried",
        True,
        "Prompt tokens whose KV arrived from a prefill engine.",
        lambda _, c: c.prompt_tokens_remote,
    ),
    MetricRow("kvferry_transfers_in", True, "Transfers received.", lambda _, c: c.transfers_in),
    MetricRow("kvferry_transfers_out", True, "Transfers sent.", lambda _, c: c.transfers_out),
    MetricRow("kvferry_transfer_failures", True, "Transfers that ended early.", lambda _, c: c.transfer_failures),
    MetricRow("kvferry_transfer_received_bytes", True, "KV bytes received.", lambda _, c: c.transfer_bytes_in),
    MetricRow("kvferry_transfer_sent_bytes", True, "KV bytes sent.", lambda _, c: c.transfer_bytes_out),
    MetricRow(
        "kvferry_transfer_tombstones",
        True,
        "Announced payloads that were cancelled by their sender.",
        lambda _, c: c.tombstones,
    ),
    MetricRow(
        "kvferry_transfer_corrupt_chunks", True, "Payloads with a wrong checksum.", lambda _, c: c.corrupt_chunks
    ),
    MetricRow("kvferry_audits", True, "Audits of the block ledger.", lambda _, c: c.audits),
    MetricRow(
        "kvferry_leaked_blocks", True, "Blocks the auditor found without an owner.", lambda _, c: c.leaked_blocks
    ),
    MetricRow("kvferry_steps", True, "Engine steps.", lambda _, c: c.steps),
)


class EngineCollector(Collector):
    """Exposes `ROWS` with the labels model_name and engine."""

    def __init__(self, *, model_name: str, engine: str, snapshot: Snapshot) -> None:
        self._labels = [model_name, engine]
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        load, counters = self._snapshot()
        for row in ROWS:
            family = CounterMetricFamily if row.is_counter else GaugeMetricFamily
            metric = family(row.name, row.help, labels=["model_name", "engine"])
            metric.add_metric(self._labels, float(row.read(load, counters)))
            yield metric
