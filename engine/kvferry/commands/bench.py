"""`kvferry bench serve`: load on a running OpenAI-compatible server, with the flag names of vLLM's benchmark."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from kvferry.bench.load import Outcome, run_load, wait_until_ready
from kvferry.bench.report import METRICS, details, render, summarize
from kvferry.bench.workload import Prompt, RandomLengths, file_prompts, random_prompts, request_body, start_times_s
from kvferry.flags import Parser
from kvferry.http_client import HttpClient, HttpError, first_model

_COMPLETIONS = ("openai", "vllm")
_CHAT = ("openai-chat",)
_ENDPOINTS = dict.fromkeys(_COMPLETIONS, "/v1/completions") | dict.fromkeys(_CHAT, "/v1/chat/completions")


def add_arguments(parser: Parser) -> None:
    """Add the one kind of measurement there is, and its flags."""
    parser.usage = "%(prog)s serve [flags]"
    parser.add_argument("what", choices=["serve"], help="Measure a running server.")
    _add_server_arguments(parser.add_argument_group("server"))
    _add_load_arguments(parser.add_argument_group("load"))
    _add_result_arguments(parser.add_argument_group("results"))


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Measure, print the table; exit code 1 when the server cannot be measured or every request failed."""
    for name in ("num_prompts", "max_concurrency", "request_rate", "burstiness"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: {value} given, it must be greater than 0")
    try:
        return asyncio.run(_measure(arguments))
    except HttpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", default="openai", choices=list(_ENDPOINTS), help="Dialect (default: openai).")
    group.add_argument("--base-url", help="Server (default: http://HOST:PORT).")
    group.add_argument("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    group.add_argument("--port", type=int, default=8000, help="Default: 8000.")
    group.add_argument("--endpoint", help="Path (default: that of the backend).")
    group.add_argument("--model", help="Model (default: the first one that the server lists).")
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="Further request headers.")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="Further body fields.")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="Wait so long for a first answer."
    )


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", default="random", choices=["random", "custom"], help="Default: random.")
    group.add_argument("--dataset-path", type=Path, help="File of a custom data set: JSON lines with a prompt each.")
    group.add_argument("--random-input-len", type=int, default=1024, help="Prompt tokens (default: 1024).")
    group.add_argument("--random-output-len", type=int, default=128, help="Output tokens (default: 128).")
    group.add_argument("--random-prefix-len", type=int, default=0, help="Tokens that all prompts share (default: 0).")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="Spread of lengths, 0 to 1 (default: 0).")
    group.add_argument("--custom-output-len", type=int, default=256, help="Output tokens of a custom data set.")
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests (default: 1000).")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="Per second (default: all at once).")
    group.add_argument("--burstiness", type=float, default=1.0, help="Evenness of starts; 1: Poisson (default).")
    group.add_argument("--max-concurrency", type=int, help="Most requests at once (default: no limit).")
    group.add_argument("--num-warmups", type=int, default=0, help="Requests before the measurement (default: 0).")
    group.add_argument("--ignore-eos", action="store_true", help="Let every answer reach its length.")
    group.add_argument("--temperature", type=float, help="Default: the server's.")
    group.add_argument("--seed", type=int, default=0, help="Of prompts and start times (default: 0).")


def _add_result_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", help=f"Of: {','.join(METRICS)}.")
    group.add_argument("--metric-percentiles", default="99", help="Comma list (default: 99).")
    group.add_argument("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="Limits a good request meets.")
    group.add_argument("--save-result", action="store_true", help="Write a JSON file.")
    group.add_argument("--save-detailed", action="store_true", help="With every request in it.")
    group.add_argument("--result-dir", type=Path, default=Path(), help="Default: the current folder.")
    group.add_argument("--result-filename", help="Default: made from backend, model and time.")
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")


async def _measure(arguments: argparse.Namespace) -> int:
    percentiles = _numbers(arguments.metric_percentiles)
    metrics = [name for name in arguments.percentile_metrics.split(",") if name]
    if unknown := [name for name in metrics if name not in METRICS]:
        raise HttpError(f"--percentile-metrics: {unknown[0]} is unknown, allowed: {', '.join(METRICS)}")
    goodput_ms = _limits(arguments.goodput)
    client = HttpClient(arguments.base_url or f"http://{arguments.host}:{arguments.port}", _headers(arguments.header))
    chat = arguments.backend in _CHAT
    path = arguments.endpoint or _ENDPOINTS[arguments.backend]
    extra = dict(arguments.extra_body)
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    if arguments.temperature is not None:
        extra["temperature"] = arguments.temperature
    try:
        model = arguments.model or await first_model(client, "/v1/models")
        hello = Prompt(content="Hello", num_prompt_tokens=1, num_output_tokens=1)
        await wait_until_ready(
            client, path, request_body(hello, model, chat=chat, extra=extra), arguments.ready_check_timeout_sec
        )
        draw = random.Random(arguments.seed)
        prompts = await _prompts(arguments, client, model, chat, draw)
        bodies = [request_body(prompt, model, chat=chat, extra=extra) for prompt in prompts]
        warm = [(0.0, prompts[0], bodies[0])] * arguments.num_warmups
        await run_load(client, path, warm, max_concurrency=arguments.max_concurrency, on_done=_ignore)
        starts = start_times_s(len(prompts), arguments.request_rate, arguments.burstiness, draw)
        progress = _Progress(len(prompts), shown=not arguments.disable_tqdm and sys.stderr.isatty())
        outcomes, duration_s = await run_load(
            client,
            path,
            list(zip(starts, prompts, bodies, strict=True)),
            max_concurrency=arguments.max_concurrency,
            on_done=progress.step,
        )
    finally:
        await client.aclose()
    summary = summarize(outcomes, duration_s, percentiles=percentiles, goodput_ms=goodput_ms)
    print(render(summary, metrics=metrics, percentiles=percentiles))
    for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
        print(f"error: {error}", file=sys.stderr)
    if arguments.save_result:
        _save(arguments, model, summary | (details(outcomes) if arguments.save_detailed else {}))
    return 0 if summary["completed"] else 1


async def _prompts(
    arguments: argparse.Namespace, client: HttpClient, model: str, chat: bool, draw: random.Random
) -> list[Prompt]:
    if arguments.dataset_name == "custom":
        if arguments.dataset_path is None:
            raise HttpError("--dataset-name custom needs --dataset-path")
        return file_prompts(arguments.dataset_path, arguments.num_prompts, arguments.custom_output_len)
    lengths = RandomLengths(
        num_input=arguments.random_input_len,
        num_output=arguments.random_output_len,
        num_prefix=arguments.random_prefix_len,
        range_ratio=arguments.random_range_ratio,
    )
    return await random_prompts(client, model, arguments.num_prompts, lengths, as_text=chat, draw=draw)


class _Progress:
    """A count of finished requests on the terminal."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0

    def step(self, outcome: Outcome) -> None:
        """Count one more."""
        self._done += 1
        if self._shown:
            end = "\n" if self._done == self._total else ""
            print(f"\r{self._done}/{self._total} requests", end=end, file=sys.stderr, flush=True)


def _ignore(outcome: Outcome) -> None:
    """Warm-up requests count for nothing."""


def _save(arguments: argparse.Namespace, model: str, result: dict[str, Any]) -> None:
    now = time.strftime("%Y%m%d-%H%M%S")
    header = {
        "date": now,
        "backend": arguments.backend,
        "model_id": model,
        "num_prompts": arguments.num_prompts,
        "request_rate": arguments.request_rate if arguments.request_rate != float("inf") else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    name = arguments.result_filename or f"{arguments.backend}-{model.replace('/', '_')}-{now}.json"
    arguments.result_dir.mkdir(parents=True, exist_ok=True)
    target: Path = arguments.result_dir / name
    target.write_text(json.dumps(header | result, indent=1) + "\n", encoding="utf-8")
    print(f"saved to {target}")


def _headers(pairs: list[str]) -> dict[str, str]:
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise HttpError(f"--header: {pair} is not KEY=VALUE")
        headers[name.lower()] = value
    return headers


def _limits(pairs: list[str]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        metric, _, limit = pair.partition(":")
        if metric not in METRICS:
            raise HttpError(f"--goodput: {metric} is unknown, allowed: {', '.join(METRICS)}")
        limits[metric] = _numbers(limit)[0]
    return limits


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise HttpError(f"{text!r} is not a list of numbers") from None
