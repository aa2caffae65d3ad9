"""A bar on terminals, sparse lines in logs."""

from __future__ import annotations

import io
import logging

import pytest

from kvferry_engine.loader.progress import load_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    terminal = Terminal()

    with load_progress(1 << 20, label="weights", stream=terminal) as progress:
        progress(1 << 20)

    assert "weights: 100%" in terminal.getvalue()


def test_a_log_gets_a_line_every_few_seconds_and_a_last_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvferry_engine.loader.progress")
    now = 0.0
    stream = io.StringIO()

    with load_progress(10 << 20, stream=stream, clock=lambda: now) as progress:
        for _ in range(10):
            now += 2.0
            progress(1 << 20)

    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "loading weights mib=3 of=10 percent=30",
        "loading weights mib=6 of=10 percent=60",
        "loading weights mib=9 of=10 percent=90",
        "loaded weights mib=10 seconds=20.0",
    ]
    assert stream.getvalue() == ""
