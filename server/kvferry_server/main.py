"""The `kvferry router` process: settings in, parts built, two listeners, an orderly end.

Only the standard library is imported at the top: signal handlers must stand before anything heavy loads, since a Python that
is PID 1 of a container ignores SIGTERM without one. `kvferry serve` runs the same function in a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn
    import zmq
    from starlette.types import ASGIApp

    from kvferry_engine.wire.sockets import WireKeys
    from kvferry_server.engines.client import RouterIdentity
    from kvferry_server.metrics import RouterMetrics
    from kvferry_server.routing.core import RouterCore
    from kvferry_server.settings import RouterSettings

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_BACKLOG = 2048
_LAST_WORDS_S = 2.0
"""For aborted streams to write their end."""


class StartError(Exception):
    """The process cannot start; the message is one line for the person who started it."""


def run(settings: RouterSettings) -> int:
    """Run a router until a signal ends it; returns the exit code.

    0 after SIGTERM (connections are accepted for `shutdown_delay` more, streams finish within `shutdown_timeout`), 130
    after SIGINT (stops now), 1 when it cannot start, after one line on standard error.
    """
    _end_at_once_on_signals()
    from kvferry_server.settings import SettingsError, from_environment

    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    try:
        return _run(from_environment(settings, os.environ))
    except (StartError, SettingsError) as error:
        sys.stderr.write(f"kvferry router: error: {error}\n")
        return EXIT_FAILED


def _end_at_once_on_signals() -> None:
    """Until something runs, a signal just ends the process."""

    def end(number: int, _frame: object) -> None:
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _run(settings: RouterSettings) -> int:
    with contextlib.ExitStack() as stack:
        # Ports first: a clash is told before anything slow happens.
        api = stack.enter_context(contextlib.closing(_bind_api(settings)))
        state = None
        if settings.metrics_port:
            state = stack.enter_context(
                contextlib.closing(_bind(settings.host, settings.metrics_port, "--metrics-port"))
            )
        return _run_loop(settings, api, state)


def _run_loop(settings: RouterSettings, api: socket.socket, state: socket.socket | None) -> int:
    loop_factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(RouterProcess(settings).serve(api, state))


# --- sockets and secrets ------------------------------------------------------------------------------------------------


def _bind_api(settings: RouterSettings) -> socket.socket:
    if settings.uds is None:
        return _bind(settings.host, settings.port, "--port")
    path = Path(settings.uds)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener


def _bind(host: str, port: int, flag: str) -> socket.socket:
    """Bind without listening. Raises StartError when the port is taken or the host is not ours."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise StartError(f"cannot listen on {host}:{port} ({flag}): {error.strerror or error}") from error
    return listener


def read_wire_keys(path: str | None) -> list[WireKeys]:
    """Return the keys of a secret file: one secret a line, the current one first. Raises StartError."""
    from kvferry_engine.wire.sockets import derive_keys

    if path is None:
        return []
    try:
        secrets = [line.strip() for line in Path(path).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise StartError(f"cannot read the wire secret {path}: {error.strerror or error}") from error
    if not secrets:
        raise StartError(f"the wire secret file {path} is empty; write a secret of at least 16 bytes")
    try:
        return [derive_keys(secret) for secret in secrets]
    except ValueError as error:
        raise StartError(f"{path}: {error}") from error


# --- the process --------------------------------------------------------------------------------------------------------


class RouterProcess:
    """Everything that lives as long as the process; `serve` is its life."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._is_closing = False
        self._is_listening = False
        self._interrupted = asyncio.Event()
        self._terminated = asyncio.Event()

    async def serve(self, api: socket.socket, state: socket.socket | None) -> int:
        """Serve on bound sockets until a signal; returns the exit code. Raises StartError, SettingsError."""
        import zmq

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            return await self._serve(api, state, context)
        finally:
            context.destroy(linger=0)

    async def _serve(
        self, api: socket.socket, state: socket.socket | None, context: zmq.Context[zmq.Socket[bytes]]
    ) -> int:
        from kvferry_server.app import create_app
        from kvferry_server.engines.client import RouterIdentity
        from kvferry_server.engines.metrics_collector import RoutingCollector, engine_reports
        from kvferry_server.engines.state_app import StateApp
        from kvferry_server.metrics import RouterMetrics

        settings = self._settings
        identity = RouterIdentity(
            boot=uuid.uuid4().hex, name=settings.name or socket.gethostname(), service=settings.service
        )
        metrics = RouterMetrics()
        core = self._build_core(identity, context, metrics)
        metrics.watch_engines(lambda: engine_reports(core.registry))
        metrics.registry.register(RoutingCollector(core))
        app = create_app(settings, core.dispatcher, metrics=metrics, is_closing=lambda: self._is_closing)
        state_app = StateApp(
            core,
            identity=identity,
            metrics=metrics.registry,
            is_listening=lambda: self._is_listening,
            is_draining=lambda: self._is_closing,
        )
        api_server, state_server = _server(settings, app, for_api=True), _server(settings, state_app, for_api=False)
        self._handle_signals()
        core.start()
        state_task = asyncio.create_task(state_server.serve(sockets=[state])) if state is not None else None
        try:
            return await self._serve_api(api_server, api, core)
        finally:
            await core.close()
            if state_task is not None:
                state_server.should_exit = state_server.force_exit = True
                await state_task
            if settings.uds is not None:
                Path(settings.uds).unlink(missing_ok=True)

    def _build_core(
        self, identity: RouterIdentity, context: zmq.Context[zmq.Socket[bytes]], metrics: RouterMetrics
    ) -> RouterCore:
        from kvferry_server.engines.discovery import SourceError, parse_sources
        from kvferry_server.routing.core import build_core

        settings = self._settings
        try:
            sources = parse_sources(settings.decode) | parse_sources(settings.prefill)
        except SourceError as error:
            raise StartError(str(error)) from error
        if not sources.addresses and not sources.names:
            raise StartError("no engines: give --decode static:HOST:PORT,... or --decode dns:NAME:PORT")

        def count_refused(limit: str) -> None:
            view = core.dispatcher.model()
            metrics.admission_rejections.labels(view.info.names[0] if view is not None else "", limit).inc()

        core = build_core(
            settings,
            sources=sources,
            identity=identity,
            context=context,
            keys=read_wire_keys(settings.wire_secret_file),
            on_refused=count_refused,
        )
        return core

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)

    async def _serve_api(self, server: uvicorn.Server, api: socket.socket, core: RouterCore) -> int:
        """Serve until a signal, then end as it asks for."""
        address = api.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[api]))
        interrupted = asyncio.create_task(self._interrupted.wait())
        terminated = asyncio.create_task(self._terminated.wait())
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._is_listening = server.started
            logger.info("router listening: address=%s metrics_port=%d", address, self._settings.metrics_port)
            await _first_of(serving, interrupted, terminated)
            if terminated.done() and not interrupted.done():
                await self._drain(server, serving, interrupted, core)
            self._is_closing = True
            self._is_listening = False
            server.should_exit = server.force_exit = True
            core.dispatcher.abort()
            await serving
        finally:
            for task in (interrupted, terminated):
                task.cancel()
        logger.info("router stopped")
        return EXIT_INTERRUPTED if self._interrupted.is_set() else 0

    async def _drain(
        self, server: uvicorn.Server, serving: asyncio.Task[None], interrupted: asyncio.Task[bool], core: RouterCore
    ) -> None:
        """Go on accepting for a while, stop listening, let streams finish; what is left then is aborted in good order."""
        settings = self._settings
        self._is_closing = True
        logger.info("router draining: in_flight=%d delay_s=%g", core.dispatcher.num_in_flight, settings.shutdown_delay)
        await _first_of(serving, interrupted, timeout_s=settings.shutdown_delay)
        self._is_listening = False
        server.should_exit = not interrupted.done()
        await _first_of(serving, interrupted, timeout_s=settings.shutdown_timeout)
        aborted = core.dispatcher.abort()
        if aborted:
            logger.warning("requests aborted at the end of the drain: num_requests=%d", len(aborted))
            await _first_of(serving, interrupted, timeout_s=_LAST_WORDS_S)


async def _first_of(*tasks: asyncio.Task[None] | asyncio.Task[bool], timeout_s: float | None = None) -> None:
    waiting: set[asyncio.Task[Any]] = set(tasks)
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _server(settings: RouterSettings, app: ASGIApp, *, for_api: bool) -> uvicorn.Server:
    """Return a uvicorn server that leaves signals to us. Raises StartError for unusable TLS files."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        server_header=False,
        timeout_keep_alive=settings.timeout_keep_alive,
        ssl_keyfile=settings.ssl_keyfile if for_api else None,
        ssl_certfile=settings.ssl_certfile if for_api else None,
        ssl_ca_certs=settings.ssl_ca_certs if for_api else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if for_api and settings.ssl_ca_certs else ssl.CERT_NONE,
    )
    try:
        config.load()
    except OSError as error:
        raise StartError(f"cannot use the TLS files: {error.strerror or error}") from error
    return Server(config)
