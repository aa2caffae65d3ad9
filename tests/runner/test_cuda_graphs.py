"""The static buffers around CUDA graphs, with the recording replaced by an ordinary forward pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kit.checkpoints import make_checkpoint
from kit.models import load_model, make_runner
from kit.steps import Blocks, generate, make_sequence
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.runner.cuda_graphs import DecodeGraphs, buckets

PROMPTS = ([5, 9, 3], list(range(20, 60)), [7] * 17)


@functools.cache
def model() -> CausalLM:
    return load_model(make_checkpoint("mistral", sliding_window=24))


class FakeGraph:
    """Replays by computing again on the static inputs, into the recorded output."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.hidden = run()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.hidden.copy_(self._run())


class FakeDecodeGraphs(DecodeGraphs):
    """Records without a GPU."""

    @torch.inference_mode()
    def _record(self, model: CausalLM, storage: torch.Tensor, size: int) -> tuple[Any, torch.Tensor]:
        inputs = self._inputs
        graph = FakeGraph(lambda: model.forward(inputs.token_ids[:size], storage, inputs.metadata(size)))
        return graph, graph.hidden


def test_buckets_end_at_what_can_be_needed() -> None:
    assert buckets(1) == [1]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(10_000)[-1] == 512


def outputs(monkeypatch: pytest.MonkeyPatch, *, with_graphs: bool) -> tuple[list[list[int]], int]:
    runner = make_runner(model())
    executor, num_replays = runner._executor, 0
    if with_graphs:
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        executor._graphs = FakeDecodeGraphs(model(), executor.storage, max_num_seqs=4, max_blocks_per_row=12)
    sequences = [make_sequence(index + 1, prompt, 32) for index, prompt in enumerate(PROMPTS)]
    tokens = generate(runner, sequences, blocks=Blocks(64, 16))
    if executor._graphs is not None:
        num_replays = sum(graph.num_replays for graph, _ in executor._graphs._graphs.values())  # type: ignore[attr-defined]
    return tokens, num_replays


def test_decode_steps_go_through_the_graphs_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows run in a bucket of four: the row that fills it up must neither write nor disturb."""
    eager, _ = outputs(monkeypatch, with_graphs=False)

    graphed, num_replays = outputs(monkeypatch, with_graphs=True)

    assert graphed == eager
    assert num_replays > 25
