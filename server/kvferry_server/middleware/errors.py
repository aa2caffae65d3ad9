"""Turns every error into the body of the path's dialect: the only place that does, for statuses and for streams.

Messages are scrubbed of addresses, tracebacks and file paths; unexpected errors are logged and become a plain sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from kvferry_server.api.body import schema_error
from kvferry_server.errors import ApiError
from kvferry_server.metrics import RouterMetrics
from kvferry_server.streaming import DONE_FRAME, ClientGoneError, JsonResponse, data_frame

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Never on the wire: the status that access lines and metrics show for a client that left (nginx's convention)."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TRACE_LINE = re.compile(r'^\s*(Traceback \(most recent call last\):|File "[^"]*", line \d+.*)$', re.MULTILINE)
_FILE_PATH = re.compile(r"(?<![\w:/.<`])/(?:[\w.\-]+/)+[\w.\-]+")


def scrub(message: str) -> str:
    """Return a message without object addresses, traceback lines and file paths."""
    message = _ADDRESS.sub("", message)
    message = _TRACE_LINE.sub("", message)
    return _FILE_PATH.sub("<path>", message)


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the OpenAI envelope."""
    return {
        "error": {
            "message": scrub(error.message),
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


class ErrorReporter:
    """Makes error responses and error frames, and counts them."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def response(self, error: ApiError) -> Response:
        """Return the response for an error."""
        self._count(error)
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        return JsonResponse(openai_body(error), status_code=error.status, headers=headers)

    def stream_frames(self, error: Exception) -> bytes:
        """Return how an OpenAI-style stream ends after an error."""
        known = error if isinstance(error, ApiError) else self.unexpected(error)
        self._count(known)
        return data_frame(openai_body(known)) + DONE_FRAME

    def unexpected(self, error: Exception) -> ApiError:
        """Log an error nobody foresaw and return what the client may know of it."""
        logger.error("request failed unexpectedly error=%s", type(error).__name__, exc_info=error)
        return ApiError("The server failed to answer this request.")

    def _count(self, error: ApiError) -> None:
        self._metrics.errors.labels(error.type, str(error.status)).inc()


async def send_response(response: Response, scope: Scope, send: Send) -> None:
    """Send a response from a middleware, without reading what the client still sends."""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    await response(scope, receive, send)


def install_error_handlers(app: FastAPI, reporter: ErrorReporter) -> None:
    """Let `app` answer errors raised in routes and dependencies."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return reporter.response(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return reporter.response(schema_error(error.errors()))

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    handlers: list[tuple[type[Exception], Callable[[Request, Exception], Any]]] = [
        (ApiError, api_error),
        (RequestValidationError, validation_error),
        (ClientGoneError, client_gone),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)
