"""Runs a command until it ends or is to stop, and other commands as its children."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal.domain.errors import ShoalError
from shoal.processes.programs import STOP_WITH_STDIN
from shoal.transports.clock import fast_loop_factory

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_loop(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run ``main`` on the fastest event loop; return its exit status.

    The argument of ``main`` is an event that the first SIGINT or SIGTERM sets; the
    second one cancels ``main``, unless this is the child of a command: a signal to all
    processes is a second one there, and its parent kills it if it has to end at once.
    """
    try:
        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            return runner.run(_with_signals(main))
    except BaseExceptionGroup as group:
        raise _cause(group) from group


def _cause(group: BaseException) -> BaseException:
    """Return the only error of a task group, else the group."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        (group,) = group.exceptions
    return group


async def _with_signals(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    is_child = bool(os.environ.get(STOP_WITH_STDIN))

    def on_signal() -> None:
        if stop.is_set() and not is_child:
            task.cancel()
        stop.set()

    for number in STOP_SIGNALS:
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:
            # Windows delivers signals outside the loop.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    if is_child:
        _call_at_end_of_stdin(lambda: loop.call_soon_threadsafe(on_signal))
    try:
        return await main(stop)
    except asyncio.CancelledError:
        return 130


def _call_at_end_of_stdin(stop: Callable[[], object]) -> None:
    """Call ``stop`` in another thread when the standard input ends."""

    def wait() -> None:
        with suppress(OSError):  # a socket whose other end was killed
            os.read(sys.stdin.fileno(), 1)  # nothing is written to it
        with suppress(RuntimeError):  # the loop has ended
            stop()

    threading.Thread(target=wait, daemon=True).start()


STOP_TIMEOUT = 10.0  # seconds
STARTED = ("ready", "standby", "joined")
UNFINISHED = ("loading", "waiting")
"""Events of a start that is still going on."""


class ProgramFailed(ShoalError):
    """A program did not start."""


@dataclass(frozen=True, slots=True)
class Program:
    """A ``shoal`` process and its first report."""

    name: str
    process: subprocess.Popen[str]
    report: dict[str, Any]


@contextmanager
def run_program(
    name: str,
    arguments: list[str],
    folder: Path,
    *,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Iterator[Program]:
    """Run ``shoal`` within the block, after waiting for its first report.

    Its log is NAME.log in ``folder``.  ``on_event`` gets the events before the first
    report.  The program has a session of its own, which Ctrl-C does not reach, and ends
    with this process, however that ends.

    Raises ProgramFailed with its log if it does not start.
    """
    log = folder / f"{name}.log"
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, STOP_WITH_STDIN: "1"},
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            report = _first_report(name, process.stdout, log, on_event)
            yield Program(name, process, report)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


def _first_report(
    name: str, output: IO[str], log: Path, on_event: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    for line in output:
        report: dict[str, Any] = json.loads(line)
        if report["event"] in STARTED:
            return report
        if report["event"] not in UNFINISHED:
            reason = report.get("reason", report["event"])
            raise ProgramFailed(f"{name}: {reason}")
        on_event(report)
    lines = log.read_text().strip().removeprefix(f"shoal {name}: ")
    raise ProgramFailed(f"`shoal {name}` did not start: {lines}")
