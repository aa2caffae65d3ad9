"""The engine process: signals first, then the model, then the loop until somebody says stop.

Light at the top on purpose: signal handlers and OpenMP's environment must be in place before torch is imported (`assembly`).
SIGTERM drains, a second signal or SIGINT stops at once; while loading either ends the process immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvferry_engine.config import EngineConfig
from kvferry_engine.config_checks import check_config
from kvferry_engine.errors import EngineError
from kvferry_engine.runner.threads import make_openmp_passive

if TYPE_CHECKING:
    from kvferry_engine.assembly import Engine

log = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
IDLE_WAIT_S = 0.5
REMOTE_RANKS_WAIT_S = 0.002
"""Idle wait while KV is in flight through ranks in other processes, whose reports do not wake the inbox."""
AUDIT_INTERVAL_S = 2.0


class Signals:
    """What the process was told. Until `engine` is set a signal ends it at once."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.is_draining = False
        self.is_stopping = False

    def install(self) -> None:
        """Take over SIGTERM and SIGINT."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.engine is None:
            os._exit(128 + number)
        if number == signal.SIGINT or self.is_draining:
            self.is_stopping = True
        else:
            self.is_draining = True
        self.engine.network.wake_core()


def run(config: EngineConfig) -> int:
    """Run an engine until it is told to stop; the exit code: 0 after a drain or stop, 1 for an error (one line on stderr)."""
    signals = Signals()
    signals.install()
    make_openmp_passive(os.environ)
    # Peers die and stores with them; torch would print a C++ stack trace for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        check_config(config)
    except EngineError as error:
        return _fail(error)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        from kvferry_engine.assembly import build_engine

        engine = build_engine(config)
    except EngineError as error:
        return _fail(error)
    signals.engine = engine
    try:
        _serve(engine, signals, config.drain_seconds)
    except EngineError as error:
        return _fail(error)
    finally:
        engine.close()
    return 0


def _serve(engine: Engine, signals: Signals, drain_s: float) -> None:
    """Turn the loop until stopped or drained."""
    engine.start()
    log.info("engine ready name=%s role=%s", engine.identity.name, engine.identity.role)
    deadline_s = float("inf")
    wait_s = 0.0
    next_audit_s = 0.0
    while not signals.is_stopping:
        engine.control.drain(wait_s)
        engine.control.give_up_lost_routers()
        engine.take_rank_reports()
        is_busy = engine.core.turn()
        engine.control.publish_events()
        now = time.monotonic()
        if signals.is_draining and deadline_s == float("inf"):
            deadline_s = now + drain_s
            engine.control.announce_drain()
            log.info("draining seconds=%.0f requests=%d", drain_s, len(engine.core.requests()))
        if signals.is_draining and (engine.is_drained or now > deadline_s):
            return
        if not is_busy and now >= next_audit_s:
            next_audit_s = now + AUDIT_INTERVAL_S
            engine.audit()
        if engine.failure:
            raise EngineError(engine.failure)
        wait_s = 0.0 if is_busy else _idle_wait_s(engine, now)


def _idle_wait_s(engine: Engine, now: float) -> float:
    waits = [IDLE_WAIT_S]
    timer_s = engine.core.transfer.next_timer_s(now)
    if timer_s is not None:
        waits.append(timer_s)
    if engine.has_remote_ranks and engine.core.transfer.is_busy():
        waits.append(REMOTE_RANKS_WAIT_S)
    return max(min(waits), 0.0)


def _fail(error: EngineError) -> int:
    """Say what is wrong in one line, also where the kubelet looks for it."""
    line = " ".join(str(error).split())
    sys.stderr.write(f"error: {line}\n")
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(f"{error.reason}: {line}"[:4000])
    return 1
