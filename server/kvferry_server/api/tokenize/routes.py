"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvferry_server.api.body import body_schema, json_body
from kvferry_server.streaming import JsonResponse

from .protocol import DetokenizeRequest, TokenizeRequest
from .service import TokenizeService


def tokenize_routes(service: TokenizeService, *, max_json_depth: int) -> APIRouter:
    """Return the routes of this family."""
    router = APIRouter(tags=["tokenizer"])
    read_tokenize = json_body(TokenizeRequest, max_depth=max_json_depth)
    read_detokenize = json_body(DetokenizeRequest, max_depth=max_json_depth)

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return JsonResponse(await service.tokenize(await read_tokenize(request)))

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return JsonResponse(await service.detokenize(await read_detokenize(request)))

    return router
