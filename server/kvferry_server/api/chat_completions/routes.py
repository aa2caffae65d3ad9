"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvferry_server.api.body import body_schema, json_body
from kvferry_server.api.context import call_context
from kvferry_server.api.respond import Responder

from .protocol import ChatCompletionRequest
from .service import ChatService


def chat_routes(service: ChatService, responder: Responder, *, max_json_depth: int) -> APIRouter:
    """Return the routes of this family."""
    router = APIRouter(tags=["generation"])
    read_body = json_body(ChatCompletionRequest, max_depth=max_json_depth)

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request)
        started = await responder.start(request, service.start(body, call_context(request)))
        if body.stream:
            return responder.stream(service.stream(started), started.batch)
        return await responder.whole(request, service.complete(started), started.batch)

    return router
