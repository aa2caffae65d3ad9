"""The small listener beside the API: /state for `kvferry up` and the operator, /ready for probes, /metrics for Prometheus.

Raw ASGI: it must answer whatever the API is doing, and it has no dialect, no keys and no bodies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvferry_server.engines.client import RouterIdentity
from kvferry_server.routing.core import RouterCore

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine in /state. `reason` says why it gets no new work; `in_flight` counts this router's sequences there."""

    name: str
    address: str
    boot: str
    role: str
    state: str
    usable: bool
    reason: str
    in_flight: int
    num_running: int
    num_waiting: int


class RouterStatePage(msgspec.Struct, kw_only=True):
    """The body of /state; fields are only ever added."""

    name: str
    boot: str
    ready: bool
    draining: bool
    model: str | None
    in_flight: int
    usable: dict[str, int]
    """Usable engines by role."""
    engines: list[EngineRow]
    decisions: dict[str, int]
    """Submissions by reason of where the prompt was to be computed."""
    moves: dict[str, int]


def describe_state(core: RouterCore, identity: RouterIdentity, *, ready: bool, draining: bool) -> RouterStatePage:
    """Return what this router knows right now."""
    registry, dispatcher = core.registry, core.dispatcher
    usable = registry.usable()
    by_role = {"prefill": 0, "decode": 0, "both": 0}
    for engine in usable:
        by_role[engine.role] += 1
    view = registry.model()
    decisions: dict[str, int] = {}
    for (reason, path), count in core.stats.decisions.items():
        decisions[f"{path}:{reason}"] = count
    return RouterStatePage(
        name=identity.name,
        boot=identity.boot,
        ready=ready,
        draining=draining,
        model=view.info.names[0] if view is not None else None,
        in_flight=dispatcher.num_in_flight,
        usable=by_role,
        engines=[
            EngineRow(
                name=engine.name,
                address=engine.address,
                boot=engine.boot,
                role=engine.role,
                state=engine.state,
                usable=engine in usable,
                reason=registry.why_unusable(engine),
                in_flight=dispatcher.num_on(engine.boot),
                num_running=engine.load.num_running,
                num_waiting=engine.load.num_waiting,
            )
            for engine in registry.engines.values()
        ],
        decisions=decisions,
        moves={cause.value: count for cause, count in core.stats.moves.items()},
    )


class StateApp:
    """ASGI application of the listener. `is_listening`: the API accepts connections; it alone decides /ready."""

    def __init__(
        self,
        core: RouterCore,
        *,
        identity: RouterIdentity,
        metrics: CollectorRegistry,
        is_listening: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        self._core = core
        self._identity = identity
        self._metrics = metrics
        self._is_listening = is_listening
        self._is_draining = is_draining

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = self._answer(scope["path"])
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        match path.rstrip("/"):
            case "/ready":
                return 200 if self._is_listening() else 503, "text/plain", b""
            case "/state":
                page = describe_state(
                    self._core, self._identity, ready=self._is_listening(), draining=self._is_draining()
                )
                return 200, "application/json", msgspec.json.encode(page)
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(self._metrics)
            case _:
                return 404, "text/plain", b"known: /state /ready /metrics\n"
