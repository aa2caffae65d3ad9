"""What a generation request says outside its body: ids, session, priority, tracing; read from headers in one place."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from kvferry_server.api.generation.protocol import INT64_MAX, INT64_MIN, GenerationFields
from kvferry_server.middleware.request_context import request_id_of, started_s_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """`request_id` is the client's X-Request-Id, else a fresh one (`is_given` tells); `received_s` is on the metrics' clock."""

    request_id: str
    is_given: bool
    received_s: float
    session_id: str = ""
    priority: int | None = None
    traceparent: str = ""

    def base_id(self, fields: GenerationFields) -> str:
        """Return the id that response ids are made of: header, then body, then random."""
        if self.is_given or not fields.request_id:
            return self.request_id
        return fields.request_id

    def session_of(self, fields: GenerationFields) -> str:
        """Return the session affinity key: body, then header, then `vllm_xargs.session_id`."""
        extra = (fields.vllm_xargs or {}).get("session_id")
        return fields.session_id or self.session_id or (extra if isinstance(extra, str) else "")

    def priority_of(self, fields: GenerationFields) -> int:
        return fields.priority if self.priority is None else self.priority


def call_context(request: Request) -> CallContext:
    """Return the context of a request."""
    request_id, is_given = request_id_of(request.scope)
    return CallContext(
        request_id=request_id,
        is_given=is_given,
        received_s=started_s_of(request.scope),
        session_id=request.headers.get("x-session-id", ""),
        priority=_parse_priority(request.headers.get("x-vllm-priority")),
        traceparent=request.headers.get("traceparent", ""),
    )


def _parse_priority(value: str | None) -> int | None:
    """Return the header's integer; anything else is ignored, as documented for this header."""
    try:
        priority = int(value) if value is not None and len(value) <= 20 else None
    except ValueError:
        return None
    return priority if priority is not None and INT64_MIN <= priority <= INT64_MAX else None
