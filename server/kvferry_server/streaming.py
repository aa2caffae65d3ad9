"""Server-sent events: a response that writes byte frames as they come, and lets go of the request when the client does.

Frames are bytes; whoever makes them has already serialised them, since a stream's cost is per token. Errors before the
first frame become ordinary error responses; later ones are frames of the dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE_FRAME = b"data: [DONE]\n\n"
KEEP_ALIVE_FRAME = b": keep-alive\n\n"
FIRST_FRAME_WAIT_S = 10.0
"""How long the status line waits for the first frame: an error until then gets a real status, and the headers can name the
prefill engine, which is known with the first token. Afterwards the stream starts anyway, for proxies that time out."""

CLIENT_GONE_KEY = "kvferry.client_gone"
"""Set in the scope of a request whose client left before the end of its stream."""

Result = TypeVar("Result")

encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed its connection; nobody will read an answer."""


class JsonResponse(Response):
    """A response whose body msgspec serialises: answers with token ids and log-probs are large."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ChunkWriter:
    """Writes the `data:` frames of one OpenAI-style stream, whose chunks share their first keys."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['

    def frame(self, choice: bytes, extra: bytes = b"") -> bytes:
        """Return a frame with one serialised choice; `extra` are further top-level keys, each led by a comma."""
        return self._head + choice + b"]" + extra + b"}\n\n"


def key_value(key: str, value: Any) -> bytes:
    """Return `,"key":value` as JSON."""
    return b"," + encode_json(key) + b":" + encode_json(value)


def data_frame(value: Any) -> bytes:
    """Return one `data:` frame."""
    return b"data: " + encode_json(value) + b"\n\n"


class EventStream(Response):
    """A streaming response over an async generator of byte frames.

    `headers_at_start` is asked for headers when the first frame is there. The generator is closed, and `close` awaited, as
    soon as the client is gone or the last frame is sent. An exception before the first frame propagates to the error
    handlers, a later one is written as `error_frame` makes it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        headers_at_start: Callable[[], Mapping[str, str]],
        error_frame: Callable[[Exception], bytes],
        close: Callable[[], Awaitable[None]],
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._headers_at_start = headers_at_start
        self._error_frame = error_frame
        self._close = close
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._write(send))
        except ClientGoneError:
            scope[CLIENT_GONE_KEY] = True
        finally:
            await self._close()

    async def _write(self, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self._frames), contextlib.aclosing(self._paced()) as frames:
            try:
                async for frame in frames:
                    if not started:
                        started = True
                        self.headers.update(self._headers_at_start())
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except Exception as error:
                if not started:
                    raise
                await send({"type": "http.response.body", "body": self._error_frame(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _paced(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames, an empty one when the first is late, and keep-alive comments in idle times."""
        idle_s = self._keep_alive_s or None
        idle_frame = KEEP_ALIVE_FRAME if idle_s else b""
        wait_s: float | None = min(FIRST_FRAME_WAIT_S, idle_s or FIRST_FRAME_WAIT_S)
        while True:
            if wait_s is None:
                # Nothing to time: no task per frame.
                async for frame in self._frames:
                    yield frame
                return
            step = asyncio.ensure_future(anext(self._frames))
            try:
                while not (await asyncio.wait({step}, timeout=wait_s))[0]:
                    yield idle_frame
                    wait_s = idle_s
                try:
                    frame = step.result()
                except StopAsyncIteration:
                    return
            finally:
                if not step.done():
                    step.cancel()
                    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                        await step
            yield frame
            wait_s = idle_s


async def run_until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`; cancel it and raise ClientGoneError when the client disconnects first.

    The body must have been read: the next message of `receive` is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        pending = [future for future in (task, watcher) if not future.done()]
        for future in pending:
            future.cancel()
        if pending:
            await asyncio.wait(pending)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
