"""Programs that a demo runs, and what it prints."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal.domain.errors import ShoalError

STOP_TIMEOUT = 10.0  # seconds
GREEN, BOLD, DIM, RED, PLAIN = "\033[32m", "\033[1m", "\033[2m", "\033[31m", "\033[0m"


class DemoError(ShoalError):
    """A part of the demo failed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A ``shoal`` process and its first report."""

    name: str
    process: subprocess.Popen[str]
    report: dict[str, Any]


@contextlib.contextmanager
def run_program(name: str, arguments: list[str], folder: Path) -> Iterator[Program]:
    """Run ``shoal`` within the block, after waiting for its first report."""
    log = folder / f"{name}.log"
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield Program(name, process, _first_report(name, process.stdout, log))
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


def _first_report(name: str, output: IO[str], log: Path) -> dict[str, Any]:
    line = output.readline()
    if not line:
        raise DemoError(f"{name} did not start:\n{log.read_text().strip()}")
    report: dict[str, Any] = json.loads(line)
    if report["event"] not in ("ready", "joined"):
        raise DemoError(f"{name}: {report.get('reason', report['event'])}")
    return report


def print_coloured(text: str, end: str = "\n") -> None:
    """Print a text, without its colours if that is not for a terminal."""
    if not sys.stdout.isatty():
        for colour in (GREEN, BOLD, DIM, RED, PLAIN):
            text = text.replace(colour, "")
    print(text, end=end, flush=True)
