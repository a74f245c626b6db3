"""Runs other ``shoal`` commands as child processes that end with this one."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal.cli.command_loop import child_environment
from shoal.domain.errors import ShoalError

STOP_TIMEOUT = 10.0  # seconds
STARTED = ("ready", "joined")
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
            env=child_environment(),
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
    name: str,
    output: IO[str],
    log: Path,
    on_event: Callable[[dict[str, Any]], None],
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
