"""Refuses bodies that are too large: by their declared length before reading, or as soon as they turn out to be."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry_server.errors import PayloadTooLargeError

from .errors import ErrorReporter, send_response


class BodyLimitMiddleware:
    """Limits request bodies to `max_bytes`."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, reporter: ErrorReporter) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._reporter = reporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            response = self._reporter.response(self._too_large())
            # The rest of the body is never read, so the connection cannot be used again.
            response.headers["connection"] = "close"
            await send_response(response, scope, send)
            return
        num_read = 0

        async def limited() -> Message:
            nonlocal num_read
            message = await receive()
            if message["type"] == "http.request":
                num_read += len(message.get("body", b""))
                if num_read > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"The body is larger than {self._max_bytes} bytes.")
