"""`make demo`: one chat request through router, prefill engine and decode engine, and the proof of which way it went.

Runs `kvferry up` as a person would, asks with the OpenAI SDK, reads the engines' names from the answer's headers and the
ferried bytes from the router's metrics, and checks that stopping leaves no process. Exit code 1 when anything is off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

_ROOT = Path(__file__).parents[1]
_QUESTION = "What is the capital of France?"
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_BYTES_METRIC = "kvferry_transferred_bytes_total"
_TIMES = {
    "waiting in the decode engine": "vllm:request_queue_time_seconds_sum",
    "waiting for KV with nothing else to do": "kvferry_transfer_exposed_seconds_sum",
    "computing the prompt (both engines)": "vllm:request_prefill_time_seconds_sum",
    "generating": "vllm:request_decode_time_seconds_sum",
}


class DemoError(Exception):
    """Something is not as the demo promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One answered question."""

    answer: str
    decode_engine: str
    prefill_engine: str
    first_token_s: float
    total_s: float


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("--keep", action="store_true", help="leave the service running")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _service(arguments.port, keep=arguments.keep) as process:
            _show(_ask(arguments.port), _metrics(arguments.port))
            if arguments.keep:
                _wait(process)
    except KeyboardInterrupt:
        if not arguments.keep:
            return 130
    except (DemoError, openai.OpenAIError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    print("demo: done, no process is left")
    return 0


@contextlib.contextmanager
def _service(port: int, *, keep: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Run `kvferry up` from ready to stopped. Raises DemoError when it does not come up or leaves a process behind."""
    command = [sys.executable, "-m", "kvferry", "up", "-f", "examples/smollm2.yaml", "--port", str(port)]
    print(f"demo: kvferry {' '.join(command[3:])}", flush=True)
    # A session of its own: Ctrl-C reaches this program, which passes it on.
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, start_new_session=True)
    family: set[int] = set()
    try:
        _wait_until_ready(process, keep=keep)
        family = _descendants(process.pid)
        yield process
    finally:
        family |= _descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        left = [pid for pid in family | {process.pid} if _is_running(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if left:
        raise DemoError(f"processes were left behind: {left}")


def _wait_until_ready(process: subprocess.Popen[bytes], *, keep: bool) -> None:
    """Relay what `kvferry up` announces until it is ready. Raises DemoError when it ends or takes too long."""
    assert process.stdout is not None
    deadline = time.monotonic() + _START_TIMEOUT_S
    announced = ""
    while announced.count("\n") < 2:
        # No thread waits beside this one: it might be given the signal that is meant to interrupt the wait.
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise DemoError(f"the service did not come up within {_START_TIMEOUT_S:.0f} s")
        chunk = os.read(process.stdout.fileno(), 4096)
        if not chunk:
            raise DemoError("the service did not come up; its lines above say why")
        announced += chunk.decode()
    ready, curl = announced.splitlines()[:2]
    print(f"demo: {ready}", flush=True)
    if keep:
        print(f"demo: try it with\n  {curl}", flush=True)


def _ask(port: int) -> Exchange:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0)
    print(f"demo: asking: {_QUESTION}", flush=True)
    started = time.monotonic()
    first_token_s = 0.0
    pieces: list[str] = []
    response = client.chat.completions.with_raw_response.create(
        model="smollm2", messages=[{"role": "user", "content": _QUESTION}], stream=True, temperature=0, max_tokens=64
    )
    for chunk in response.parse():
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first_token_s = first_token_s or time.monotonic() - started
            pieces.append(text)
    # In one line at the end, because the service's own log lines share the terminal.
    answer = "".join(pieces)
    print(f"demo: answer, streamed in {len(pieces)} pieces: {answer}")
    return Exchange(
        answer=answer,
        decode_engine=response.headers.get("x-kvferry-decode", ""),
        prefill_engine=response.headers.get("x-kvferry-prefill", ""),
        first_token_s=first_token_s,
        total_s=time.monotonic() - started,
    )


def _metrics(port: int) -> dict[str, float]:
    """Return the router's metrics, summed over labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    totals: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _show(exchange: Exchange, metrics: dict[str, float]) -> None:
    """Print the way the request took. Raises DemoError when it is not the promised one."""
    ferried_bytes = metrics.get(_BYTES_METRIC, 0.0)
    print(f"demo: prefilled by {exchange.prefill_engine or 'nobody else'}, decoded by {exchange.decode_engine}")
    print(f"demo: KV ferried: {ferried_bytes:,.0f} bytes")
    print(f"demo: first token after {exchange.first_token_s * 1000:.0f} ms, all after {exchange.total_s * 1000:.0f} ms")
    for label, metric in _TIMES.items():
        if metric in metrics:
            print(f"demo:   {label}: {metrics[metric] * 1000:.0f} ms")
    if "Paris" not in exchange.answer:
        raise DemoError("the answer does not name Paris")
    if not exchange.prefill_engine or exchange.prefill_engine == exchange.decode_engine:
        raise DemoError("the prompt was not computed by another engine than the one that generated")
    if not ferried_bytes:
        raise DemoError("no KV was ferried")


def _wait(process: subprocess.Popen[bytes]) -> None:
    print("demo: running until Ctrl-C", flush=True)
    process.wait()


def _descendants(pid: int) -> set[int]:
    """Return the ids of all processes below `pid`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def _is_running(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
