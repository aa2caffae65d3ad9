"""Engines killed and frozen at random under load: no request lost, hung or wrong, nothing leaked, every engine back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from kit.checkpoints import make_checkpoint
from kit.cluster import Cluster, wait_for

DURATION_S = float(os.environ.get("KVFERRY_CHAOS_SECONDS", "180"))
NUM_CLIENTS = 6
NUM_PROMPTS = 12
FLAGS = ["--max-model-len", "512", "--num-gpu-blocks-override", "96"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DURATION_S + 420)]


def restart(cluster: Cluster, name: str) -> None:
    cluster.engines[name].kill()
    cluster.engines[name].start()


def freeze(cluster: Cluster, name: str, seconds: float, stop: threading.Event) -> None:
    cluster.engines[name].signal(signal.SIGSTOP)
    stop.wait(seconds)
    cluster.engines[name].signal(signal.SIGCONT)


def test_random_kills_and_freezes_lose_no_request(tmp_path: Path) -> None:
    seed = int(os.environ.get("KVFERRY_CHAOS_SEED", "11"))
    draw = random.Random(seed)
    prompts = [[draw.randrange(10, 200) for _ in range(draw.choice((3, 40, 90, 170)))] for _ in range(NUM_PROMPTS)]
    lengths = [draw.choice((8, 40, 120, 250)) for _ in range(NUM_PROMPTS)]
    model = str(make_checkpoint("llama", tmp_path))
    with Cluster(model, engine_flags=FLAGS) as cluster:
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
            cluster.add_engine(name, role)
        cluster.add_router("--disaggregation", "always")
        cluster.wait_ready()
        expected = [cluster.stream(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        stop = threading.Event()
        problems: list[str] = []
        served = [0] * NUM_CLIENTS

        def client(number: int) -> None:
            mine = random.Random(seed + number)
            while not stop.is_set():
                which = mine.randrange(NUM_PROMPTS)
                try:
                    ids = cluster.stream(prompts[which], lengths[which])
                except Exception as error:
                    problems.append(f"prompt {which}: {type(error).__name__}: {error}")
                    return
                if ids != expected[which]:
                    problems.append(f"prompt {which}: {ids} instead of {expected[which]}")
                    return
                served[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        kills = 0
        end = time.monotonic() + DURATION_S
        while time.monotonic() < end and not problems:
            stop.wait(draw.uniform(1.0, 4.0))
            victim = draw.choice(list(cluster.engines))
            if draw.random() < 0.5:
                kills += 1
                restart(cluster, victim)
            else:
                freeze(cluster, victim, draw.choice((0.3, 1.5, 3.0, 10.0)), stop)
        stop.set()
        for thread in threads:
            thread.join(180)

        assert not problems, problems[:3]
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        assert kills > 0
        assert min(served) > 0
        cluster.wait_ready(timeout_s=90)
        for name, process in cluster.engines.items():
            wait_for(lambda p=process: p.metrics().get("vllm:num_requests_running") == 0, what=f"{name} is idle")
            wait_for(
                lambda p=process: p.metrics().get("kvferry_staging_slots_used") == 0,
                what=f"{name} has no staging slot in use",
            )
            wait_for(lambda p=process: p.metrics().get("kvferry_audits_total", 0) > 0, what=f"{name} was audited")
            assert process.metrics()["kvferry_leaked_blocks_total"] == 0, process.log()[-2000:]
