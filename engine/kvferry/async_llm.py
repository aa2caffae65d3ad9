"""`AsyncLLM`: an engine on a thread of the calling process, with async streams; for servers and agents."""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from kvferry.outputs import RequestOutput
from kvferry.params import SamplingParams
from kvferry.session import Prompt, Session
from kvferry.settings import engine_config
from kvferry_engine.assembly import EngineParts, build_parts
from kvferry_engine.config import EngineConfig
from kvferry_engine.wire.messages import Step

IDLE_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Where the outputs of one request go; `put` may be called from any thread."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[RequestOutput | Exception]

    def put(self, item: RequestOutput | Exception) -> None:
        with suppress(RuntimeError):  # the reader's event loop is closed
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class AsyncLLM:
    """One model in this process, usable from any event loop. Settings are those of `kvferry engine` (`EngineConfig`).

    The model loads in the constructor (blocks; call it in a thread where that matters) and raises what `LLM` raises. Close it
    when done.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._calls: queue.SimpleQueue[Callable[[Session], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        # The engine thread's own view: an id may be used again before its last request has been aborted here.
        self._submitted: dict[str, _Stream] = {}
        self._is_closing = False
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(engine_config(model, settings),), name="kvferry-engine", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream one request: each item is the whole output so far. Leaving the loop early aborts the request.

        Raises ValueError for a request that cannot run.
        """
        params = sampling_params or SamplingParams()
        stream = self._stream(lambda session, rid: session.submit(prompt, params, request_id=rid), request_id)
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to a conversation; otherwise like `generate`."""
        params = sampling_params or SamplingParams()
        stream = self._stream(
            lambda session, rid: session.submit(session.render(messages), params, request_id=rid), request_id
        )
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason abort. Unknown ids are ignored."""
        self._calls.put(lambda session: self._abort(session, request_id))

    def close(self) -> None:
        """End every stream and free the model. Blocks until the engine thread has ended."""
        self._is_closing = True
        self._calls.put(lambda _: None)
        self._thread.join()

    async def _stream(
        self, submit: Callable[[Session, str], object], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        rid = request_id or uuid.uuid4().hex
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        if self._streams.setdefault(rid, stream) is not stream:
            raise ValueError(f"request id {rid!r} is running already; give another one or none")
        # Looked at after the stream is listed: the engine thread ends the listed ones once it has seen the flag.
        if self._is_closing or self._failure is not None:
            del self._streams[rid]
            raise RuntimeError("this AsyncLLM is closed") from self._failure

        def start(session: Session) -> None:
            try:
                submit(session, rid)
                self._submitted[rid] = stream
            except Exception as error:  # noqa: BLE001 - travels to the caller, who raises it
                stream.put(error)

        def leave(session: Session) -> None:
            if self._submitted.get(rid) is stream:
                del self._submitted[rid]
                session.abort(rid)

        self._calls.put(start)
        try:
            while True:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._calls.put(leave)
            del self._streams[rid]

    # --- the engine thread --------------------------------------------------------------------------------------------

    def _run(self, config: EngineConfig) -> None:
        steps: list[Step] = []
        parts: EngineParts | None = None
        try:
            parts = build_parts(config, send=lambda _, step: steps.append(step), clock=time.monotonic)
            session = Session(parts, chat_template=config.chat_template)
            self._ready.set()
            is_busy = False
            while not self._is_closing:
                self._take_calls(session, wait_s=0.0 if is_busy else IDLE_WAIT_S)
                is_busy = parts.core.turn()
                for step in steps:
                    for request in session.read(step):
                        self._deliver(request.output)
                steps.clear()
        except Exception as error:  # noqa: BLE001 - travels to the caller, who raises it
            self._failure = error
        finally:
            for stream in list(self._streams.values()):
                stream.put(self._failure or RuntimeError("this AsyncLLM was closed"))
            if parts is not None:
                parts.close()
            self._ready.set()

    def _take_calls(self, session: Session, wait_s: float) -> None:
        try:
            call = self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            while True:
                call(session)
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def _abort(self, session: Session, request_id: str) -> None:
        request = session.abort(request_id)
        if request is not None:
            self._deliver(request.output)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._submitted.get(output.request_id)
        if stream is not None:
            stream.put(copy.deepcopy(output))
