"""Running a set of routers and engines on this machine: start, announce readiness, end on a signal.

Knows command lines only as lists of words, so that `kvferry up` and `kvferry serve` share it; `local` makes plans from
manifests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry_operator.errors import ChildFailedError
from kvferry_operator.readiness import RouterState, fetch_state
from kvferry_operator.supervisor import ChildSpec, Stop, Supervisor, SupervisorSettings, make_printer

_logger = logging.getLogger(__name__)

WIRE_HOST = "127.0.0.1"
"""Engines of this machine are reached over loopback only, so the wire needs no secret."""

PORTS_PER_ENGINE = 3

PROGRAM = (sys.executable, "-m", "kvferry")
"""The `kvferry` command of the Python that runs now."""

_ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Spinning OpenMP threads of several processes on few cores stop each other; must be set before torch loads."""

_READY_POLL_S = 0.2
_DRAIN_MARGIN_S = 30.0
_ROUTERS_DRAIN = 0
_ENGINES_DRAIN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """Processes to run, and how to tell that they work."""

    name: str
    model: str
    children: tuple[ChildSpec, ...]
    api_urls: tuple[str, ...]
    state_host: str
    state_port: int
    num_prefill: int
    num_decode: int
    load_timeout_s: float
    drain_s: float
    needs_key: bool = False


def engine_child(
    name: str, argv: Sequence[str], *, threads: int | None = None, extra: Mapping[str, str] | None = None
) -> ChildSpec:
    """Return the child that runs an engine, with `threads` per rank and `extra` environment variables."""
    environment = dict(_ENGINE_ENVIRONMENT)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return ChildSpec(name=name, argv=argv, environment=environment | dict(extra or {}), drain_order=_ENGINES_DRAIN)


def router_child(name: str, argv: Sequence[str]) -> ChildSpec:
    """Return the child that runs a router; routers finish their streams before engines end."""
    return ChildSpec(name=name, argv=argv, drain_order=_ROUTERS_DRAIN)


def reachable_host(bound: str) -> str:
    """Return the address by which this machine reaches a listener bound to `bound`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(bound, bound)


def api_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return the base URL by which this machine reaches an API that listens on `host`."""
    reachable = reachable_host(host)
    bracketed = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{bracketed}:{port}"


def run_plan(plan: LocalPlan, announce: Callable[[str], None], *, started: float) -> int:
    """Supervise a plan's processes until SIGINT (now) or SIGTERM (drain); returns the exit code.

    Raises ChildFailedError when a process can never start or the service is not ready in time. No process is left.
    """
    return asyncio.run(_supervise(plan, announce, started))


async def _supervise(plan: LocalPlan, announce: Callable[[str], None], started: float) -> int:
    settings = SupervisorSettings(drain_s=plan.drain_s + _DRAIN_MARGIN_S)
    printer = make_printer([child.name for child in plan.children])
    supervisor = Supervisor(plan.children, settings, printer)
    exit_codes = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGHUP: 129}
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        how = Stop.DRAIN if number is signal.SIGTERM else Stop.NOW
        supervisor.request_stop(how)
        _logger.info("%s received, stopping (%s)", number.name, how)

    loop = asyncio.get_running_loop()
    for number in exit_codes:
        loop.add_signal_handler(number, on_signal, number)
    names = ", ".join(child.name for child in plan.children)
    _logger.info("starting %s", names)
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(_announce_ready(plan, supervisor, announce, started))
    try:
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and (error := ready.exception()) is not None:
            supervisor.request_stop(Stop.NOW)
            await running
            raise error
        await running
    finally:
        ready.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildFailedError):
            await ready
    _logger.info("stopped")
    return exit_codes[received[-1]] if received else 0


async def _announce_ready(
    plan: LocalPlan, supervisor: Supervisor, announce: Callable[[str], None], started: float
) -> None:
    """Wait until the first router can use all engines, say how to reach it. Raises ChildFailedError when too late."""
    last: RouterState | None = None
    deadline = started + plan.load_timeout_s
    while True:
        state = await fetch_state(plan.state_host, plan.state_port)
        if state is not None and state.covers(num_prefill=plan.num_prefill, num_decode=plan.num_decode):
            break
        if state is not None and state != last:
            _logger.info("waiting: %s", state.describe(num_prefill=plan.num_prefill, num_decode=plan.num_decode))
            last = state
        if time.monotonic() > deadline:
            raise ChildFailedError(f"{plan.name} was not ready within {plan.load_timeout_s:.0f} s")
        await asyncio.sleep(_READY_POLL_S)
    supervisor.mark_ready()
    announce(f"{plan.name} is ready after {time.monotonic() - started:.1f} s: {plan.api_urls[0]}/v1")
    for url in plan.api_urls[1:]:
        announce(f"also at {url}/v1")
    announce(curl_line(plan))


def curl_line(plan: LocalPlan) -> str:
    """Return a command that asks the service something."""
    body = json.dumps(
        {"model": plan.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )
    key = " -H 'authorization: Bearer KEY'" if plan.needs_key else ""
    return f"curl {plan.api_urls[0]}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
