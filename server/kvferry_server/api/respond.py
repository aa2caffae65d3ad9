"""How generation routes answer: start, then whole or streamed, letting go of the engines when the client leaves.

Routes stay thin, services stay free of HTTP; this is the glue between them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvferry_server.api.generation.running import Batch
from kvferry_server.settings import RouterSettings
from kvferry_server.streaming import EventStream, JsonResponse, run_until_disconnect

Result = TypeVar("Result")


class Responder:
    """Makes the responses of generation routes."""

    def __init__(self, settings: RouterSettings, error_frames: Callable[[Exception], bytes]) -> None:
        self._keep_alive_s = settings.sse_keep_alive_interval
        self._error_frames = error_frames

    async def start(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what `work` started, unless the client leaves before. Raises ClientGoneError and what `work` raises."""
        return await run_until_disconnect(request.receive, work)

    async def whole(self, request: Request, work: Coroutine[Any, Any, dict[str, Any]], batch: Batch) -> Response:
        """Return the whole answer. Raises ClientGoneError and what `work` raises."""
        try:
            answer = await run_until_disconnect(request.receive, work)
            return JsonResponse(answer, headers=batch.headers())
        finally:
            await batch.aclose()

    def stream(self, frames: AsyncGenerator[bytes, None], batch: Batch) -> Response:
        """Return a response that streams `frames`."""
        return EventStream(
            frames,
            headers_at_start=batch.headers,
            error_frame=self._error_frames,
            close=batch.aclose,
            keep_alive_s=self._keep_alive_s,
        )
