"""API keys: every route needs one except the few that say nothing about users; none configured means open.

Keys may come from a file that changes under us (a mounted Secret): it is looked at again at most once a second.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry_server.settings import SettingsError
from kvferry_server.streaming import JsonResponse

from .errors import send_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/load",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
    }
)
RELOAD_INTERVAL_S = 1.0


class KeyStore:
    """The accepted keys, as digests. `is_open` true: no key was ever configured."""

    def __init__(self, keys: Sequence[str], path: str | None, *, clock: Callable[[], float]) -> None:
        """Raise SettingsError when the key file cannot be read or holds no key."""
        self._fixed = [_digest(key.strip()) for key in keys]
        self._path = Path(path) if path else None
        self._clock = clock
        self._from_file: list[bytes] = []
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = clock()
        if self._path is not None:
            try:
                self._read(self._path)
            except OSError as error:
                raise SettingsError(f"api_key_file {path} cannot be read: {error}") from error
            if not self._from_file:
                raise SettingsError(f"api_key_file {path} holds no key; write one key a line")
        self.is_open = not self._fixed and self._path is None

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of the accepted keys; takes the same time whichever it is or is not."""
        self._refresh()
        digest = _digest(key)
        is_known = False
        for known in (*self._fixed, *self._from_file):
            is_known |= hmac.compare_digest(digest, known)
        return is_known

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_s < RELOAD_INTERVAL_S:
            return
        self._looked_s = now
        try:
            self._read(self._path)
        except OSError as error:
            logger.error("key file unreadable, keeping the keys error=%s", type(error).__name__)

    def _read(self, path: Path) -> None:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        self._from_file = [_digest(key) for key in keys if key]
        if self._stamp is not None:
            logger.info("key file read again num_keys=%d", len(self._from_file))
        self._stamp = stamp


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AuthMiddleware:
    """Answers 401 to requests without an accepted key, before anything of them is read."""

    def __init__(self, app: ASGIApp, *, keys: KeyStore) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._keys.is_open or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send_response(JsonResponse({"error": "Unauthorized"}, status_code=401), scope, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope.get("method") == "OPTIONS":
            return True
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._keys.accepts(key.strip())
