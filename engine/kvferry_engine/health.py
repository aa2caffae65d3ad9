"""The engine's HTTP side: /health, /ready and /metrics for probes and Prometheus, and nothing else.

Served by threads of the standard library's HTTP server, so that a long step cannot make a probe fail; /health judges the core
by the age of its last turn.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvferry_engine.errors import ConfigError, PortInUseError
from kvferry_engine.stats import EngineStats

REQUEST_TIMEOUT_S = 5.0
STALLED_AFTER_S = 60.0
"""A core that has not turned for this long is not healthy: no step takes a minute."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """What probes are told; written by the core's thread and the parts, read by the HTTP threads.

    /health: the core turned lately and nothing failed (loading counts as healthy, the startup probe bounds it). /ready: loaded,
    and some router has said HELLO since the start.
    """

    clock: Callable[[], float]
    stats: EngineStats | None = None
    has_met_router: bool = False
    failure: str = ""

    def health(self) -> tuple[bool, str]:
        """(ok, detail)."""
        if self.failure:
            return False, self.failure
        if self.stats is None:
            return True, "loading"
        age_s = self.clock() - self.stats.last_turn_s
        return age_s < STALLED_AFTER_S, f"last turn {age_s:.1f} s ago"

    def ready(self) -> tuple[bool, str]:
        """(ok, detail)."""
        is_healthy, detail = self.health()
        if self.stats is None or not is_healthy:
            return False, detail
        return self.has_met_router, detail if self.has_met_router else "no router has said hello yet"


class HealthServer:
    """Answers from the moment it is started, also while the model loads."""

    def __init__(self, *, host: str, port: int, probe: Probe, registry: CollectorRegistry) -> None:
        """Bind. Raises PortInUseError, ConfigError for an address that is not of this machine."""

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.split("?", 1)[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif path in ("/health", "/ready"):
                    is_ok, detail = probe.health() if path == "/health" else probe.ready()
                    self._answer(
                        200 if is_ok else 503, json.dumps({"ok": is_ok, "detail": detail}).encode(), "application/json"
                    )
                else:
                    self._answer(404, b'{"detail":"Not Found"}', "application/json")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} on {host} is in use; stop what listens there or choose another --http-port"
                ) from error
            raise ConfigError(f"cannot bind the health port to {host}:{port}: {error.strerror}") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(REQUEST_TIMEOUT_S)
        self._server.server_close()
