"""The small endpoints that machines watch: /health, /ping, /version, /load, /metrics."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from kvferry_server.metrics import RouterMetrics
from kvferry_server.requests import Gateway
from kvferry_server.streaming import JsonResponse


def instrumentator_routes(
    gateway: Gateway, metrics: RouterMetrics, *, version: str, server_load: Callable[[], int]
) -> APIRouter:
    """Return the routes of this family."""
    router = APIRouter(tags=["instrumentator"])

    # 200 while some engine can take work: what vLLM's /health says of its one engine.
    @router.get("/health")
    @router.get("/ping")
    async def show_health() -> Response:
        return Response(status_code=200 if gateway.model() is not None else 503)

    @router.post("/ping")
    async def ping() -> Response:
        return await show_health()

    @router.get("/version")
    async def show_version() -> Response:
        return JsonResponse({"version": version})

    @router.get("/load")
    async def show_load() -> Response:
        return JsonResponse({"server_load": server_load()})

    @router.get("/metrics")
    def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
