"""`kvferry chat`, `complete` and `bench serve` against a small server that speaks the API."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.openai_server import FakeServer, serving
from kvferry import cli
from kvferry.bench.workload import percentile, start_times_s


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def test_chat_prints_the_streamed_answer(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--url", f"{server.url}/v1", "-q", "hello there", "--system-prompt", "Be kind.", "--api-key", "k"]

    assert cli.main(words) == 0

    assert capsys.readouterr().out == "hello there \n"
    assert server.keys == ["Bearer k"]
    assert server.bodies == [
        {
            "model": "first",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there"}],
            "stream": True,
        }
    ]


def test_a_conversation_remembers(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))

    assert cli.main(["chat", "--url", f"{server.url}/v1", "--model-name", "second", "--max-tokens", "5"]) == 0

    assert capsys.readouterr().out == "one \ntwo \n"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "one ", "two"]
    assert server.bodies[1]["model"] == "second"
    assert server.bodies[1]["max_tokens"] == 5


def test_complete_prints_the_continuation(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "--url", f"{server.url}/v1", "-q", "Once upon"]) == 0

    assert capsys.readouterr().out == "Once upon!\n"


@pytest.mark.parametrize(
    ("status", "breaks_off", "message"),
    [
        (503, False, "error: status 503: no room\n"),
        (200, True, "error: the server closed the connection in the middle"),
    ],
)
def test_errors_of_the_server_are_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str], status: int, breaks_off: bool, message: str
) -> None:
    server.status, server.breaks_off = status, breaks_off

    assert cli.main(["chat", "--url", f"{server.url}/v1", "-q", "hello"]) == 1

    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "ftp://host/", "http://host:port/"])
def test_servers_that_cannot_be_reached_are_one_line(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert cli.main(["chat", "--url", url, "-q", "hello"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("backend", "key"), [("openai", "max_tokens"), ("openai-chat", "max_completion_tokens")])
def test_bench_measures_and_saves(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: str, key: str
) -> None:
    words = f"""bench serve --base-url {server.url} --backend {backend} --num-prompts 6 --max-concurrency 2 --num-warmups 1
        --random-input-len 5 --random-output-len 3 --ignore-eos --temperature 0 --metric-percentiles 50,99 --seed 1
        --percentile-metrics ttft,e2el --goodput ttft:60000 --save-result --result-dir {tmp_path} --result-filename r.json"""

    assert cli.main(words.split()) == 0

    output = capsys.readouterr().out
    assert "Successful requests:                               6" in output
    assert "P99 E2EL (ms):" in output
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (6, 0, 2)
    assert result["total_input_tokens"] == 66
    assert result["median_ttft_ms"] > 0
    assert result["request_goodput"] == result["request_throughput"]
    measured = server.bodies[2:]
    assert all(body[key] == 3 and body["ignore_eos"] and body["temperature"] == 0 for body in measured)
    if backend == "openai":
        prompts = [body["prompt"] for body in measured]
        assert {len(prompt) for prompt in prompts} == {5}
        assert len({str(prompt) for prompt in prompts}) == 6


def test_bench_reads_prompts_from_a_file(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 7}\n{"prompt": "two"}\n')
    words = ["bench", "serve", "--base-url", server.url, "--dataset-name", "custom", "--dataset-path", str(path)]

    assert cli.main([*words, "--num-prompts", "3", "--custom-output-len", "9"]) == 0

    assert sorted((body["prompt"], body["max_tokens"]) for body in server.bodies[1:]) == [
        ("one", 7), ("one", 7), ("two", 9),
    ]  # fmt: skip


def test_bench_fails_when_every_request_fails(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503

    assert cli.main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]) == 1

    assert "does not answer a first request: status 503: no room" in capsys.readouterr().err


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert math.isnan(percentile([], 50))


def test_start_times_have_the_asked_rate() -> None:
    times = list(start_times_s(4000, 10.0, 1.0, random.Random(0)))

    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)
    assert list(start_times_s(3, math.inf, 1.0, random.Random(0))) == [0.0, 0.0, 0.0]
