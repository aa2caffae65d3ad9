"""Questions to an engine that wait for an answer: ADMIN, SET_ROLE and pieces of assets, over one `EngineClient`.

A client has one `PendingCalls`, feeds it the answers and fails it together with the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry_engine.wire.messages import Admin, AdminResult, Assets, AssetsRequest, Beat, Body, Message, Role, SetRole
from kvferry_server.engines.link import LinkError, LinkLostError

_Key = tuple[str, str, int]


class PendingCalls:
    """`send` returns False when there is no connection; `why` then says why."""

    def __init__(self, *, send: Callable[[Body], bool], why: Callable[[], str], caller: str) -> None:
        self._send = send
        self._why = why
        self._caller = caller
        self._waiters: dict[_Key, list[asyncio.Future[Message]]] = {}
        self._num_calls = 0

    async def admin(self, operation: str, arguments: dict[str, object], timeout_s: float) -> AdminResult:
        """Run one ADMIN operation; no connection and no answer are results too."""
        self._num_calls += 1
        call = f"{self._caller}-{self._num_calls}"
        request = Admin(id=call, operation=operation, arguments=arguments)
        try:
            answer = await self._ask(request, ("admin", call, 0), timeout_s)
        except LinkError as error:
            return AdminResult(id=call, ok=False, message=str(error))
        assert isinstance(answer, AdminResult)
        return answer

    async def set_role(self, role: Role, timeout_s: float) -> AdminResult:
        """Send SET_ROLE and wait for a BEAT that tells the role."""
        call = f"role-{role}"
        try:
            await self._ask(SetRole(role=role), ("role", role, 0), timeout_s)
        except LinkError as error:
            return AdminResult(id=call, ok=False, message=str(error))
        return AdminResult(id=call, ok=True)

    async def fetch_piece(self, digest: str, offset: int, timeout_s: float) -> Assets:
        """Ask for one piece of an asset bundle. Raises LinkError."""
        answer = await self._ask(AssetsRequest(digest=digest, offset=offset), ("assets", digest, offset), timeout_s)
        assert isinstance(answer, Assets)
        return answer

    def answered(self, body: AdminResult | Assets | Beat) -> None:
        """Take a message that may be an answer."""
        if isinstance(body, AdminResult):
            key: _Key = ("admin", body.id, 0)
        elif isinstance(body, Assets):
            key = ("assets", body.digest, body.offset)
        else:
            key = ("role", body.role or "", 0)
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(body)

    def fail(self, reason: str) -> None:
        """The connection is gone: no answer will come."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(LinkLostError(reason))

    async def _ask(self, body: Body, key: _Key, timeout_s: float) -> Message:
        if not self._send(body):
            raise LinkLostError(f"not connected: {self._why()}")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, [])
        waiters.append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise LinkLostError(f"no answer within {timeout_s:g} s") from error
        finally:
            waiters.remove(answer)
            if not waiters:
                self._waiters.pop(key, None)
