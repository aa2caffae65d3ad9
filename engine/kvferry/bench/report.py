"""Numbers of a finished load: rates and percentiles, as a table for people and as JSON under vLLM's key names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.bench.load import Outcome
from kvferry.bench.workload import percentile

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_WIDTH = 52
_MS = 1000.0


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return totals, rates per second, and mean, median, deviation and percentiles of each metric in milliseconds."""
    done = [outcome for outcome in outcomes if outcome.succeeded]
    num_input = sum(outcome.num_prompt_tokens for outcome in done)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    if goodput_ms:
        summary["request_goodput"] = sum(_meets(outcome, goodput_ms) for outcome in done) / duration_s
    for metric in METRICS:
        values = [value for outcome in done for value in _values_ms(outcome, metric)]
        summary[f"mean_{metric}_ms"] = statistics.fmean(values) if values else math.nan
        summary[f"median_{metric}_ms"] = percentile(values, 50)
        summary[f"std_{metric}_ms"] = statistics.pstdev(values) if values else math.nan
        for percent in percentiles:
            summary[f"p{percent:g}_{metric}_ms"] = percentile(values, percent)
    return summary


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of every request, in order."""
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "ttfts": [outcome.first_token_s for outcome in outcomes],
        "itls": [outcome.gaps_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def render(summary: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the table that a person reads."""
    rows = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _row("Successful requests:", summary["completed"]),
        _row("Failed requests:", summary["failed"]),
        _row("Benchmark duration (s):", summary["duration"]),
        _row("Total input tokens:", summary["total_input_tokens"]),
        _row("Total generated tokens:", summary["total_output_tokens"]),
        _row("Request throughput (req/s):", summary["request_throughput"]),
    ]
    if "request_goodput" in summary:
        rows.append(_row("Request goodput (req/s):", summary["request_goodput"]))
    rows += [
        _row("Output token throughput (tok/s):", summary["output_throughput"]),
        _row("Total token throughput (tok/s):", summary["total_token_throughput"]),
    ]
    for metric in metrics:
        rows.append(METRICS[metric].center(_WIDTH, "-"))
        rows.append(_row(f"Mean {metric.upper()} (ms):", summary[f"mean_{metric}_ms"]))
        rows.append(_row(f"Median {metric.upper()} (ms):", summary[f"median_{metric}_ms"]))
        rows += [
            _row(f"P{percent:g} {metric.upper()} (ms):", summary[f"p{percent:g}_{metric}_ms"])
            for percent in percentiles
        ]
    rows.append("=" * _WIDTH)
    return "\n".join(rows)


def _values_ms(outcome: Outcome, metric: str) -> list[float]:
    if metric == "itl":
        return [gap_s * _MS for gap_s in outcome.gaps_s]
    value_s = {
        "ttft": outcome.first_token_s,
        "tpot": outcome.time_per_token_s,
        "e2el": outcome.latency_s,
    }[metric]
    return [] if value_s is None else [value_s * _MS]


def _meets(outcome: Outcome, goodput_ms: Mapping[str, float]) -> bool:
    return all(
        value_ms <= most_ms for metric, most_ms in goodput_ms.items() for value_ms in _values_ms(outcome, metric)
    )


def _row(label: str, value: float) -> str:
    shown = f"{value}" if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40}{shown:>{_WIDTH - 40}}"
