"""A small HTTP/1.1 client on asyncio streams: JSON requests and server-sent events, for `chat`, `complete` and `bench`.

Written here because the base install has no HTTP library, and because a load generator that shares two cores with the
server it measures must cost little. Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_MOST_LINE_BYTES = 1 << 24
_MOST_ERROR_CHARS = 500


class HttpError(Exception):
    """The server answered with an error status, broke the protocol or could not be reached."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers (lower-case names) of an answer."""

    status: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = field(default=False)


class HttpClient:
    """Requests to one server. `base_url` may end in a path such as /v1; request paths are appended to it."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises HttpError for what is no http or https URL."""
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{base_url} is not an http:// or https:// URL")
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise HttpError(f"{base_url}: {error}") from error
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base_path = parts.path.rstrip("/")
        self._headers = {"host": parts.netloc, "content-type": "application/json", **(headers or {})}
        self._idle: list[_Connection] = []

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded JSON body of an answer with status 200. Raises HttpError for any other."""
        async with self._request(method, path, body) as (answer, chunks):
            content = b"".join([chunk async for chunk in chunks])
        _raise_for_status(answer, content)
        try:
            return json.loads(content)
        except ValueError as error:
            raise HttpError(f"the answer to {method} {path} is not JSON") from error

    @contextlib.asynccontextmanager
    async def events(self, path: str, body: Any) -> AsyncIterator[tuple[Answer, AsyncIterator[Any]]]:
        """POST and yield the answer with an iterator over the JSON data of its events, up to [DONE].

        Raises HttpError for an error status, an error event, or a stream that ends without [DONE].
        """
        async with self._request("POST", path, body) as (answer, chunks):
            if answer.status != 200:
                _raise_for_status(answer, b"".join([chunk async for chunk in chunks]))
            yield answer, _events(chunks)

    async def aclose(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().writer.close()

    @contextlib.asynccontextmanager
    async def _request(self, method: str, path: str, body: Any) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {self._base_path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, "content-length": len(payload)}.items()]
        message = "\r\n".join([*lines, "", ""]).encode("latin-1") + payload
        try:
            connection, answer = await self._exchange(message)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise HttpError(f"no answer from {self._host}:{self._port}: {error}") from error
        body_reader = _Body(connection.reader, answer)
        try:
            yield answer, body_reader.chunks()
        finally:
            if body_reader.complete and answer.headers.get("connection", "").lower() != "close":
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _exchange(self, message: bytes) -> tuple[_Connection, Answer]:
        """Send over a kept connection, or a new one when the kept one turns out to be closed."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                answer = await _read_head(connection.reader)
            except (OSError, asyncio.IncompleteReadError):
                connection.writer.close()
                if not connection.used:
                    raise
                continue
            except BaseException:
                connection.writer.close()
                raise
            connection.used = True
            return connection, answer

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_MOST_LINE_BYTES)
        return _Connection(reader, writer)


async def first_model(client: HttpClient, path: str) -> str:
    """Return the name of the first model that a server lists at `path`. Raises HttpError when it lists none."""
    listing = await client.json("GET", path)
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise HttpError(f"the server lists no models at {path}") from error


class _Body:
    """The body of one answer, chunked, of a stated length, or up to the end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        self.complete = False
        """The whole body was read, so the connection can carry another request."""
        self._reader = reader
        self._answer = answer

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            if "chunked" in self._answer.headers.get("transfer-encoding", "").lower():
                while size := int((await self._reader.readline()).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                while (await self._reader.readline()).strip():
                    pass
                self.complete = True
            elif "content-length" in self._answer.headers:
                yield await self._reader.readexactly(int(self._answer.headers["content-length"]))
                self.complete = True
            else:
                while chunk := await self._reader.read(1 << 16):
                    yield chunk
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise HttpError("the server closed the connection in the middle of an answer") from error


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    status_line = await reader.readline()
    if not status_line:
        raise asyncio.IncompleteReadError(b"", None)
    fields = status_line.split(maxsplit=2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        raise ValueError(f"not an HTTP answer: {status_line[:60]!r}")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(fields[1]), headers)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Yield the JSON data of events. Only the `data` fields matter to the APIs that are spoken here."""
    pending = b""
    done = False
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise HttpError(_error_text(event, data))
            yield event
    if not done:
        raise HttpError("the stream ended without [DONE]")


def _raise_for_status(answer: Answer, content: bytes) -> None:
    if answer.status == 200:
        return
    try:
        text = _error_text(json.loads(content), content)
    except ValueError:
        text = content.decode("utf-8", "replace")[:_MOST_ERROR_CHARS]
    raise HttpError(f"status {answer.status}: {text}", status=answer.status)


def _error_text(body: Any, raw: bytes) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else raw.decode("utf-8", "replace"))[:_MOST_ERROR_CHARS]
