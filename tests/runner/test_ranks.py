"""Tensor parallelism over real processes: the same tokens as one rank, services beside the model, and prompt deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.checkpoints import make_checkpoint
from kit.steps import Blocks, generate, make_plan, make_sequence
from kvferry_engine.config import Device, EngineConfig
from kvferry_engine.errors import InvalidTensorParallelError
from kvferry_engine.loader.source import open_source
from kvferry_engine.runner.build import BuiltRunner, build_runner
from kvferry_engine.runner.ranks import RankDiedError

NUM_TOKENS = 24
PROMPTS = ([5, 9, 3], list(range(20, 60)), [7] * 17)


class EchoService:
    """Answers every payload with its rank, once the rank's loop has turned; says how long the storage's head axis is."""

    def __init__(self, rank: int, num_heads: int, wake: Callable[[], None]) -> None:
        self._rank, self._num_heads, self._wake = rank, num_heads, wake
        self._reports: list[bytes] = []

    def handle(self, payload: bytes) -> None:
        self._reports.append(payload + f" rank {self._rank} heads {self._num_heads}".encode())
        self._wake()

    def poll(self) -> list[bytes]:
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        return


def make_echo(setup: bytes, rank: int, storage: Any, wake: Callable[[], None]) -> EchoService:
    assert setup == b"echo"
    return EchoService(rank, storage.shape[3], wake)


@contextmanager
def built(path: Path, tensor_parallel_size: int, **arguments: Any) -> Iterator[BuiltRunner]:
    config = EngineConfig(
        model=str(path),
        device=Device.CPU,
        block_size=16,
        num_gpu_blocks_override=64,
        tensor_parallel_size=tensor_parallel_size,
        threads=1,
    )
    runner = build_runner(config, open_source(config.model), **arguments)
    try:
        yield runner
    finally:
        runner.close()


def outputs(path: Path, tensor_parallel_size: int) -> list[list[int]]:
    with built(path, tensor_parallel_size) as parts:
        sequences = [make_sequence(index + 1, prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)]
        return generate(parts.runner, sequences, blocks=Blocks(64, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "arch", "overrides"),
    [
        (2, "llama", {"attention_bias": True, "mlp_bias": True}),
        (2, "qwen3", {"tie_word_embeddings": False, "vocab_size": 319}),
        (4, "qwen2", {}),
        (3, "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}),
    ],
)
def test_several_ranks_give_the_tokens_of_one(size: int, arch: str, overrides: dict[str, Any]) -> None:
    """Four ranks over two KV heads replicate them."""
    path = make_checkpoint(arch, **overrides)

    assert outputs(path, size) == outputs(path, 1)


@pytest.mark.slow
def test_prompt_logprobs_come_from_all_ranks() -> None:
    path = make_checkpoint("llama")
    found = []
    for size in (1, 2):
        with built(path, size) as parts:
            sequence = make_sequence(1, PROMPTS[1], 4, prompt_logprobs=2)
            parts.runner.launch(make_plan(0, [(sequence, 40)], Blocks(64, 16)))
            found.append(parts.runner.collect().prompt_logprobs[0])

    one, two = found
    assert len(one) == len(two) == 39
    assert [entry.ids for entry in one] == [entry.ids for entry in two]


@pytest.mark.slow
def test_services_of_ranks_answer_in_order_with_steps() -> None:
    path = make_checkpoint("llama")
    service = f"{__name__}:make_echo" if "." not in __name__ else "test_ranks:make_echo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])]))
        with built(path, 2, service=service, service_setup=b"echo") as parts:
            assert parts.ranks is not None
            parts.ranks.send_service(1, b"first")
            parts.runner.launch(make_plan(0, [(make_sequence(1, [1, 2], 4), 2)], Blocks(64, 16)))
            parts.ranks.send_service(1, b"second")
            reports: list[tuple[int, bytes]] = []
            deadline = time.monotonic() + 20
            while len(reports) < 2 and time.monotonic() < deadline:
                reports += parts.ranks.poll_service()
                time.sleep(0.01)

    assert reports == [(1, b"first rank 1 heads 1"), (1, b"second rank 1 heads 1")]


def rank_pids() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if "kvferry_engine.runner.rank" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
def test_the_death_of_a_rank_is_told_and_ends_the_next_step() -> None:
    told: list[RankDiedError] = []
    with built(make_checkpoint("llama"), 2, on_rank_death=told.append) as parts:
        (pid,) = rank_pids()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)

        assert "rank 1 exited with status -9" in str(told[0])
        with pytest.raises(RankDiedError, match="rank 1"):
            parts.runner.launch(make_plan(0, [(make_sequence(1, [1, 2], 4), 2)], Blocks(64, 16)))


@pytest.mark.slow
def test_a_rank_that_dies_during_a_step_is_named_instead_of_the_broken_collective() -> None:
    with built(make_checkpoint("llama"), 2) as parts:
        (pid,) = rank_pids()
        assert parts.ranks is not None
        os.kill(pid, signal.SIGSTOP)
        parts.runner._ranks = _KillAfterSend(parts.ranks, pid)  # type: ignore[assignment]
        with pytest.raises(RankDiedError, match="rank 1"):
            parts.runner.launch(make_plan(0, [(make_sequence(1, [1, 2], 4), 2)], Blocks(64, 16)))


class _KillAfterSend:
    """Kills the stopped rank once it has been sent a batch, so that rank 0 is alone in the first collective."""

    def __init__(self, ranks: Any, pid: int) -> None:
        self._ranks, self._pid = ranks, pid

    def run(self, batch: Any) -> None:
        self._ranks.run(batch)
        os.kill(self._pid, signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


@pytest.mark.slow
def test_a_failure_while_loading_is_reported_by_its_reason() -> None:
    path = make_checkpoint("llama", seed=41)
    config = EngineConfig(
        model=str(path), device=Device.CPU, num_gpu_blocks_override=64, tensor_parallel_size=2, threads=1
    )
    source = open_source(config.model)
    (path / "model.safetensors").write_bytes(b"rubbish")

    with pytest.raises(RankDiedError, match=r"rank 1 failed \(WeightsInvalid\): .*model.safetensors"):
        build_runner(config, source)

    assert not rank_pids()


def test_an_indivisible_size_fails_before_any_process_starts() -> None:
    path = make_checkpoint("llama")
    with pytest.raises(InvalidTensorParallelError), built(path, 3):
        pass
    assert not rank_pids()


@pytest.mark.slow
def test_a_rank_whose_parent_is_gone_exits_at_once() -> None:
    nobody = "1"
    command = [sys.executable, "-m", "kvferry_engine.runner.rank", "0", nobody]
    assert subprocess.run(command, timeout=60, check=False, stdin=subprocess.DEVNULL).returncode == 1
