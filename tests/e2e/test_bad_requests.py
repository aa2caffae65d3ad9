"""Requests that a real router and engine must refuse in the documented form, and still serve the next one."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from kit.checkpoints import make_checkpoint
from kit.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_CONTEXT = 256


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ["--max-model-len", str(_CONTEXT), "--num-gpu-blocks-override", "32"]
    with Cluster(str(make_checkpoint("llama")), engine_flags=flags) as made:
        made.add_engine("d0", "both")
        made.add_router()
        made.wait_ready()
        yield made


def _refused(cluster: Cluster, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    """Status and error object of a POST that must fail."""
    request = urllib.request.Request(cluster.url + path, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(request, timeout=60)
    error: dict[str, Any] = json.loads(failure.value.read())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == failure.value.code
    return failure.value.code, error


def _assert_serves(cluster: Cluster) -> None:
    (ids,), _ = cluster.complete([5, 6, 7], 4)
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"temperature": float("nan")}, 400, None, "temperature"),
        ({"temperature": -1}, 400, "BadRequestError", "temperature"),
        ({"temperature": "warm"}, 400, "Bad Request", "body.temperature"),
        ({"model": "nobody"}, 404, "NotFoundError", "model"),
        ({"prompt": [5] * (_CONTEXT + 1)}, 400, "BadRequestError", "input_tokens"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt"),
        ({"prompt": []}, 400, "BadRequestError", "prompt"),
        ({"prompt": [320]}, 400, "BadRequestError", "prompt"),
    ],
    ids=["nan", "negative", "wrong type", "unknown model", "too long", "empty", "no ids", "id outside"],
)
def test_a_bad_field_is_named_and_the_next_request_is_served(
    cluster: Cluster, fields: dict[str, Any], status: int, kind: str | None, param: str
) -> None:
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, **fields}).encode()

    code, error = _refused(cluster, body)

    assert code == status
    if kind is not None:
        assert (error["type"], error["param"]) == (kind, param)
    assert error["message"]
    _assert_serves(cluster)


def test_a_body_of_100_mb_is_refused_before_it_is_read(cluster: Cluster) -> None:
    url = urlsplit(cluster.url)
    assert url.hostname is not None
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {100 << 20}\r\n\r\n"
    )

    with socket.create_connection((url.hostname, url.port or 80), timeout=30) as connection:
        connection.sendall(head.encode() + b'{"prompt": "')
        answer = connection.recv(65536).decode()

    assert answer.startswith("HTTP/1.1 413 ")
    _assert_serves(cluster)


def test_a_chunked_body_of_100_mb_is_refused_when_it_turns_out_too_large(cluster: Cluster) -> None:
    url = urlsplit(cluster.url)
    assert url.hostname is not None
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"

    with socket.create_connection((url.hostname, url.port or 80), timeout=30) as connection:
        connection.sendall(head.encode())
        num_sent = 0
        try:
            while num_sent < 100:
                connection.sendall(chunk)
                num_sent += 1
            answer = connection.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""

    assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    assert num_sent < 100 or answer
    _assert_serves(cluster)


def test_what_is_not_json_is_refused(cluster: Cluster) -> None:
    code, _ = _refused(cluster, b'{"prompt": ')

    assert code == 400
    _assert_serves(cluster)
