"""The supervisor over tiny shell and Python children: restarts, permanent errors, stops, and nothing left behind."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry_operator.errors import ChildFailedError
from kvferry_operator.supervisor import ChildSpec, OutputPrinter, Stop, Supervisor, SupervisorSettings

_FAST = SupervisorSettings(backoff_first_s=0.01, backoff_most_s=0.02, grace_s=0.5, drain_s=5.0)
_TIMEOUT_S = 20.0
_FOREVER = "while :; do sleep 0.05; done"


def _sh(name: str, script: str, *, drain_order: int = 0) -> ChildSpec:
    return ChildSpec(name=name, argv=["/bin/sh", "-c", script], drain_order=drain_order)


def _supervisor(*specs: ChildSpec, settings: SupervisorSettings = _FAST) -> tuple[Supervisor, io.StringIO]:
    output = io.StringIO()
    return Supervisor(specs, settings, OutputPrinter(output, [spec.name for spec in specs])), output


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_lines_of_children_carry_their_names() -> None:
    supervisor, output = _supervisor(_sh("a", f"echo one; echo two >&2; {_FOREVER}"), _sh("bcd", _FOREVER))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: output.getvalue().count("\n") == 2)
    supervisor.request_stop(Stop.NOW)
    await running

    assert output.getvalue() == "a   | one\na   | two\n"


async def test_progress_bars_are_thinned_but_their_last_state_is_kept() -> None:
    bar = r"for i in 1 2 3 4 5 6; do printf 'load %d\r' $i; done; printf 'load done\n'"
    supervisor, output = _supervisor(_sh("a", f"{bar}; {_FOREVER}"))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: "done" in output.getvalue())
    supervisor.request_stop(Stop.NOW)
    await running

    assert output.getvalue() == "a | load 1\na | load done\n"


async def test_a_crashed_child_starts_again_with_the_same_command_line(tmp_path: Path) -> None:
    counter = tmp_path / "starts"
    supervisor, _ = _supervisor(_sh("a", f"echo x >> {counter}; [ $(wc -l < {counter}) -ge 3 ] && {_FOREVER}; exit 7"))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: counter.exists() and counter.read_text().count("x") == 3)
    supervisor.request_stop(Stop.NOW)
    await running

    assert supervisor.children[0].starts == 3


async def test_a_killed_child_starts_again_however_often() -> None:
    supervisor, _ = _supervisor(_sh("a", "kill -9 $$"))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: supervisor.children[0].starts > 2 * _FAST.most_start_failures)
    supervisor.request_stop(Stop.NOW)
    await running

    assert not running.exception()


async def test_pauses_between_starts_grow_up_to_the_limit() -> None:
    settings = SupervisorSettings(backoff_first_s=0.5, backoff_most_s=3.0)
    supervisor, _ = _supervisor(_sh("a", "true"), settings=settings)

    pauses = [supervisor.children[0].next_pause_s() for _ in range(5)]

    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("code", [1, 2])
async def test_a_permanent_error_before_readiness_ends_everything_with_its_message(code: int) -> None:
    failing = _sh("engine", f"echo 'kvferry engine: error: no such model' >&2; exit {code}")
    supervisor, _ = _supervisor(failing, _sh("other", _FOREVER))

    with pytest.raises(ChildFailedError, match=r"^engine: no such model$"):
        await supervisor.run()

    assert [child.pid for child in supervisor.children] == [None, None]
    assert supervisor.children[0].starts == 1


async def test_a_child_that_fails_again_and_again_before_readiness_is_given_up() -> None:
    supervisor, _ = _supervisor(_sh("engine", "echo Traceback; echo ValueError: surprise; exit 1"))

    with pytest.raises(ChildFailedError, match=r"engine failed 5 times in a row \(exit code 1\): ValueError: surprise"):
        await supervisor.run()


async def test_after_readiness_no_error_is_permanent() -> None:
    supervisor, _ = _supervisor(_sh("engine", "echo 'error: port in use'; exit 1"))
    supervisor.mark_ready()

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: supervisor.children[0].starts > 2 * _FAST.most_start_failures)
    supervisor.request_stop(Stop.NOW)
    await running

    assert not running.exception()


async def test_a_command_that_does_not_exist_is_a_clear_error() -> None:
    supervisor, _ = _supervisor(ChildSpec(name="a", argv=["/nonexistent/program"]))

    with pytest.raises(ChildFailedError, match="a: cannot run /nonexistent/program: No such file"):
        await supervisor.run()


async def test_stop_now_kills_children_that_do_not_listen_and_what_they_started() -> None:
    stubborn = f"trap '' INT TERM; (trap '' INT TERM; echo $(sh -c 'echo $PPID'); {_FOREVER}) & echo $$; {_FOREVER}"
    supervisor, output = _supervisor(_sh("a", stubborn))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: output.getvalue().count("\n") == 2)
    pids = [int(line.split("|")[1]) for line in output.getvalue().splitlines()]
    assert all(map(_is_alive, pids))
    supervisor.request_stop(Stop.NOW)
    await running

    await _until(lambda: not any(map(_is_alive, pids)))


async def test_drain_ends_children_in_order() -> None:
    def draining(name: str, order: int) -> ChildSpec:
        return _sh(name, f"trap 'sleep 0.2; echo end; exit 0' TERM; echo up; {_FOREVER}", drain_order=order)

    supervisor, output = _supervisor(draining("engine", 1), draining("router", 0))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: output.getvalue().count("up") == 2)
    supervisor.request_stop(Stop.DRAIN)
    await running

    ends = [line for line in output.getvalue().splitlines() if line.endswith("end")]
    assert ends == ["router | end", "engine | end"]
    assert [child.starts for child in supervisor.children] == [1, 1]


async def test_a_second_stop_request_cuts_a_drain_short() -> None:
    supervisor, output = _supervisor(_sh("a", f"trap 'echo draining' TERM; echo up; {_FOREVER}"))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: "up" in output.getvalue())
    supervisor.request_stop(Stop.DRAIN)
    await _until(lambda: "draining" in output.getvalue())
    supervisor.request_stop(Stop.DRAIN)
    await asyncio.wait_for(running, _TIMEOUT_S)

    assert supervisor.children[0].pid is None


async def test_a_stop_during_the_pause_before_a_restart_ends_at_once() -> None:
    supervisor, _ = _supervisor(_sh("a", "exit 7"), settings=SupervisorSettings(backoff_first_s=60.0))

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: supervisor.children[0].failures == 1)
    supervisor.request_stop(Stop.NOW)
    await asyncio.wait_for(running, 2.0)

    assert supervisor.children[0].starts == 1


async def test_a_drain_lasts_no_longer_than_its_limit() -> None:
    settings = SupervisorSettings(grace_s=0.1, drain_s=0.2)
    supervisor, output = _supervisor(_sh("a", f"trap '' TERM INT; echo up; {_FOREVER}"), settings=settings)

    running = asyncio.create_task(supervisor.run())
    await _until(lambda: "up" in output.getvalue())
    supervisor.request_stop(Stop.DRAIN)
    await asyncio.wait_for(running, _TIMEOUT_S)

    assert supervisor.children[0].pid is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_do_not_outlive_their_supervisor(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import asyncio, signal, sys
            from kvferry_operator.supervisor import ChildSpec, OutputPrinter, Stop, Supervisor, SupervisorSettings

            async def main() -> None:
                script = "echo $$; while :; do sleep 0.05; done"
                specs = [ChildSpec(name=name, argv=["/bin/sh", "-c", script]) for name in ("a", "b")]
                supervisor = Supervisor(specs, SupervisorSettings(), OutputPrinter(sys.stdout, ["a", "b"]))
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGINT, supervisor.request_stop, Stop.NOW)
                loop.add_signal_handler(signal.SIGTERM, supervisor.request_stop, Stop.DRAIN)
                await supervisor.run()

            asyncio.run(main())
            """
        )
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split("|")[1]) for _ in range(2)]
        process.send_signal(number)
        process.wait(_TIMEOUT_S)

    deadline = time.monotonic() + _TIMEOUT_S
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_is_alive, pids))
