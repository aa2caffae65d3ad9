"""Tells a person, or a log, how far the loading of weights is, since it is the longest part of an engine's start.

On a terminal a bar by bytes; anywhere else one log line every few seconds, so that a pod's log stays readable.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Called with the number of bytes of the checkpoint read since the last call."""

LOG_INTERVAL_S = 5.0
MIB = 1 << 20


@contextmanager
def load_progress(
    total_bytes: int,
    *,
    label: str = "weights",
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Yield the function to hand to `ModelSource.weights`; reports on `stream` (stderr) when that is a terminal, else logs."""
    output: TextIO = stream or sys.stderr
    if output.isatty():
        with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, unit_divisor=1024, file=output) as bar:

            def advance(num_bytes: int) -> None:
                bar.update(num_bytes)

            yield advance
        return
    lines = _LogLines(total_bytes, label, clock)
    yield lines.add
    lines.finish()


class _LogLines:
    def __init__(self, total_bytes: int, label: str, clock: Callable[[], float]) -> None:
        self._total = total_bytes
        self._label = label
        self._clock = clock
        self._done = 0
        self._started = self._last = clock()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = self._clock()
        if now - self._last >= LOG_INTERVAL_S:
            self._last = now
            share = 100 * self._done // max(self._total, 1)
            log.info("loading %s mib=%d of=%d percent=%d", self._label, self._done // MIB, self._total // MIB, share)

    def finish(self) -> None:
        log.info("loaded %s mib=%d seconds=%.1f", self._label, self._done // MIB, self._clock() - self._started)
