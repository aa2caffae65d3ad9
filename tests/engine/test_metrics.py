"""The list of an engine's metrics is frozen here: dashboards and alerts name them."""

from __future__ import annotations

from kvferry_engine.metrics import ROWS, EngineCollector
from kvferry_engine.wire.messages import Counters, Load

NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "kvferry_staging_slots_used",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "kvferry_prompt_tokens_computed",
    "kvferry_prompt_tokens_ferried",
    "kvferry_transfers_in",
    "kvferry_transfers_out",
    "kvferry_transfer_failures",
    "kvferry_transfer_received_bytes",
    "kvferry_transfer_sent_bytes",
    "kvferry_transfer_tombstones",
    "kvferry_transfer_corrupt_chunks",
    "kvferry_audits",
    "kvferry_leaked_blocks",
    "kvferry_steps",
]


def test_names_are_frozen_and_explained() -> None:
    assert [row.name for row in ROWS] == NAMES
    assert all(row.help.endswith(".") for row in ROWS)


def test_every_metric_reads_the_snapshot() -> None:
    load, counters = Load(num_running=3, used_blocks=1, free_blocks=3), Counters(generation_tokens=7)
    collector = EngineCollector(model_name="m", engine="e", snapshot=lambda: (load, counters))
    samples = {sample.name: sample for metric in collector.collect() for sample in metric.samples}

    assert len(samples) == len(NAMES)
    assert samples["vllm:num_requests_running"].value == 3
    assert samples["vllm:kv_cache_usage_perc"].value == 0.25
    assert samples["vllm:generation_tokens_total"].value == 7
    assert samples["vllm:generation_tokens_total"].labels == {"model_name": "m", "engine": "e"}
