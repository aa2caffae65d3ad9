"""An OpenAI-compatible server in a thread that answers every prompt with its own words, for the clients' tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class FakeServer:
    """What a test sees of it: its address, the requests it got, and how it should misbehave."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    status: int = 200
    breaks_off: bool = False


@contextmanager
def serving() -> Iterator[FakeServer]:
    """Run a server on a free port as long as the context lasts."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._json({"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.keys.append(self.headers.get("authorization", ""))
            if self.path == "/tokenize":
                self._json({"tokens": [len(word) for word in body["prompt"].split()]})
            elif self.path == "/detokenize":
                self._json({"prompt": " ".join("x" * token for token in body["tokens"])})
            elif fake.status != 200:
                self._json({"error": {"message": "no room"}}, fake.status)
            else:
                fake.bodies.append(body)
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            chat = "messages" in body
            words = body["messages"][-1]["content"].split() if chat else [str(body["prompt"])[:9], "!"]
            for word in words:
                self._event({"choices": [{"delta": {"content": f"{word} "}} if chat else {"text": word}]})
            if fake.breaks_off:
                self.close_connection = True
                return
            usage = {"prompt_tokens": 11, "completion_tokens": len(words)}
            self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, event: dict[str, Any]) -> None:
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def _json(self, value: Any, status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
