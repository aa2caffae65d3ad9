"""Requests of one session on one engine, however engines come and go.

Rendezvous hashing (Thaler and Ravishankar: A name-based mapping scheme for rendezvous, 1996): an engine that leaves
moves only its own sessions, and every router agrees without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvferry_server.routing.policies.base import Candidate, Policy, role_rank
from kvferry_server.routing.snapshot import RoutedRequest


class Session:
    """Orders engines by hash of (session, engine name); requests without a session go by another policy."""

    def __init__(self, without_session: Policy) -> None:
        self._without_session = without_session

    def order(self, candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]:
        if not request.session_id:
            return self._without_session.order(candidates, request)
        return sorted(
            candidates, key=lambda c: (role_rank(c), _weight(request.session_id, c.engine.name), c.engine.boot)
        )


def _weight(session_id: str, engine_name: str) -> bytes:
    return hashlib.sha256(f"{session_id}\x00{engine_name}".encode()).digest()
