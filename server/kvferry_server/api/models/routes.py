"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvferry_server.streaming import JsonResponse

from .service import ModelService


def model_routes(service: ModelService) -> APIRouter:
    """Return the routes of this family."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JsonResponse(service.cards())

    # Names may have slashes, as hub ids do.
    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JsonResponse(service.get(name))

    return router
