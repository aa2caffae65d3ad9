"""Puts the HTTP side together: middleware, routes, services. Everything is passed in, nothing is global.

`main` makes the settings, the gateway and the metrics, and serves what `create_app` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as distribution_version

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvferry_server.api.chat_completions.routes import chat_routes
from kvferry_server.api.chat_completions.service import ChatService
from kvferry_server.api.completions.routes import completion_routes
from kvferry_server.api.completions.service import CompletionService
from kvferry_server.api.generation.service import GenerationService
from kvferry_server.api.instrumentator.routes import instrumentator_routes
from kvferry_server.api.models.routes import model_routes
from kvferry_server.api.models.service import ModelService
from kvferry_server.api.respond import Responder
from kvferry_server.api.tokenize.routes import tokenize_routes
from kvferry_server.api.tokenize.service import TokenizeService
from kvferry_server.metrics import RouterMetrics
from kvferry_server.middleware.auth import AuthMiddleware, KeyStore
from kvferry_server.middleware.body_limit import BodyLimitMiddleware
from kvferry_server.middleware.errors import ErrorReporter, install_error_handlers
from kvferry_server.middleware.request_context import InFlight, RequestContextMiddleware
from kvferry_server.requests import Gateway
from kvferry_server.settings import RouterSettings
from kvferry_server.text.model_text import TextLibrary


def create_app(
    settings: RouterSettings,
    gateway: Gateway,
    *,
    metrics: RouterMetrics,
    is_closing: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Return the router's ASGI application.

    `is_closing` true makes every response ask its client to reconnect (shutdown). Raises SettingsError for a key file that
    is unreadable or empty and for a chat template file that is not there.
    """
    version = distribution_version("kvferry")
    with_docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="kvferry",
        version=version,
        root_path=settings.root_path,
        openapi_url="/openapi.json" if with_docs else None,
        docs_url="/docs" if with_docs else None,
        redoc_url="/redoc" if with_docs else None,
    )
    reporter = ErrorReporter(metrics)
    in_flight = InFlight(metrics)
    _add_middleware(app, settings, metrics, reporter, in_flight, is_closing)
    install_error_handlers(app, reporter)

    generation = GenerationService(
        settings=settings, gateway=gateway, texts=TextLibrary(settings), metrics=metrics, version=version
    )
    responder = Responder(settings, reporter.stream_frames)
    depth = settings.max_json_depth
    for routes in (
        instrumentator_routes(gateway, metrics, version=version, server_load=lambda: in_flight.num_requests),
        tokenize_routes(TokenizeService(generation), max_json_depth=depth),
        model_routes(ModelService(gateway)),
        completion_routes(CompletionService(generation), responder, max_json_depth=depth),
        chat_routes(ChatService(generation), responder, max_json_depth=depth),
    ):
        app.include_router(routes)
    return app


def _add_middleware(
    app: FastAPI,
    settings: RouterSettings,
    metrics: RouterMetrics,
    reporter: ErrorReporter,
    in_flight: InFlight,
    is_closing: Callable[[], bool],
) -> None:
    """Wrap the app, innermost first: body limit, keys, CORS (so that a 401 can be read by a browser), request context."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes, reporter=reporter)
    keys = KeyStore(settings.api_key, settings.api_key_file, clock=metrics.clock)
    app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )
    app.add_middleware(
        RequestContextMiddleware,
        settings=settings,
        metrics=metrics,
        reporter=reporter,
        in_flight=in_flight,
        is_closing=is_closing,
    )
