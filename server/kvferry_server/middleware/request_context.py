"""The outermost middleware: request ids, access lines, HTTP metrics, and the last resort for unexpected errors.

Access lines are JSON and hold no user text: method, path, status, times, ids.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry_server.metrics import RouterMetrics
from kvferry_server.settings import RouterSettings
from kvferry_server.streaming import CLIENT_GONE_KEY, encode_json

from .errors import CLIENT_CLOSED_REQUEST, ErrorReporter, send_response

access_logger = logging.getLogger("kvferry.access")

MAX_REQUEST_ID_CHARS = 256
SCOPE_KEY = "kvferry"

UNMEASURED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
COUNTED_HANDLERS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Routes whose requests /load counts while they are answered."""


@dataclass(slots=True)
class _Exchange:
    """What is known of one request and its response."""

    request_id: str
    is_given: bool
    started_s: float
    status: int = 0
    num_bytes: int = 0
    engines: dict[str, str] = field(default_factory=dict)


def request_id_of(scope: Scope) -> tuple[str, bool]:
    """Return the request's id and whether the client gave it."""
    exchange: _Exchange = scope[SCOPE_KEY]
    return exchange.request_id, exchange.is_given


def started_s_of(scope: Scope) -> float:
    """Return when the request arrived, in seconds of the metrics' clock."""
    exchange: _Exchange = scope[SCOPE_KEY]
    return exchange.started_s


class InFlight:
    """Number of requests on counted routes that are being answered."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.num_requests = 0
        metrics.requests_in_flight.set_function(lambda: float(self.num_requests))


class RequestContextMiddleware:
    """See the module. `is_closing` true: every response asks the client to close its connection."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: RouterSettings,
        metrics: RouterMetrics,
        reporter: ErrorReporter,
        in_flight: InFlight,
        is_closing: Callable[[], bool],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._reporter = reporter
        self._in_flight = in_flight
        self._is_closing = is_closing
        self._logs = not settings.disable_access_log
        self._quiet_paths = frozenset(settings.disable_access_log_for_endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        is_given = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isprintable()
        exchange = _Exchange(given if is_given else secrets.token_hex(16), is_given, self._metrics.clock())
        scope[SCOPE_KEY] = exchange
        is_counted = scope["path"] in COUNTED_HANDLERS

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = exchange.request_id
                if self._is_closing():
                    response_headers["connection"] = "close"
                for name in ("x-kvferry-decode", "x-kvferry-prefill"):
                    if name in response_headers:
                        exchange.engines[name.rpartition("-")[2]] = response_headers[name]
            elif message["type"] == "http.response.body":
                exchange.num_bytes += len(message.get("body", b""))
            await send(message)

        self._in_flight.num_requests += is_counted
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - the edge of a request: logged by the reporter
            problem = self._reporter.unexpected(error)
            if not exchange.status:
                await send_response(self._reporter.response(problem), scope, send_with_id)
        finally:
            self._in_flight.num_requests -= is_counted
            self._finish(scope, headers, exchange)

    def _finish(self, scope: Scope, headers: Headers, exchange: _Exchange) -> None:
        status = exchange.status or CLIENT_CLOSED_REQUEST
        if status == CLIENT_CLOSED_REQUEST or scope.get(CLIENT_GONE_KEY):
            self._metrics.disconnects.inc()
        elapsed = self._metrics.clock() - exchange.started_s
        path = scope["path"]
        if path not in UNMEASURED_PATHS:
            self._measure(scope, headers, exchange, status, elapsed)
        if self._logs and path not in self._quiet_paths:
            access_logger.info(
                "%s",
                encode_json(
                    {
                        "time": round(time.time(), 3),
                        "event": "request",
                        "method": scope["method"],
                        "path": path,
                        "status": status,
                        "seconds": round(elapsed, 4),
                        "bytes": exchange.num_bytes,
                        "request_id": exchange.request_id,
                        **exchange.engines,
                    }
                ).decode(),
            )

    def _measure(self, scope: Scope, headers: Headers, exchange: _Exchange, status: int, elapsed_s: float) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"]
        metrics = self._metrics
        metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        metrics.http_duration.labels(handler, method).observe(elapsed_s)
        metrics.http_duration_highr.observe(elapsed_s)
        length = headers.get("content-length", "")
        metrics.http_request_size.labels(handler).observe(int(length) if length.isdecimal() else 0)
        metrics.http_response_size.labels(handler).observe(exchange.num_bytes)
