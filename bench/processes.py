"""Programs that a bench starts, with the CPU time and the memory they use (Linux)."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_MAX = 120.0  # seconds until a program answers
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Program:
    """A running program and the JSON line it began with."""

    process: subprocess.Popen[str]
    report: dict[str, Any]

    def cpu(self) -> float:
        """Return the seconds of CPU time used so far, its children's included."""
        return cpu_of_all(self.process.pid)

    def memory(self) -> float:
        """Return the resident memory in MB, its children's included."""
        return sum(each.memory_info().rss for each in _tree(self.process.pid)) / 1e6


@contextmanager
def program(
    *arguments: str,
    within: Sequence[str] = (),
    stdin: int | None = None,
    stderr: int | None = None,
    python: str = sys.executable,
) -> Iterator[Program]:
    """Run Python with ``arguments`` until the block ends; wait for its first line.

    ``within`` is the command that runs Python, such as one of a network namespace.
    """
    command = [*within, python, *arguments]
    with _running(command, subprocess.PIPE, stdin=stdin, stderr=stderr) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"python {' '.join(arguments)}: ended before it began")
        yield Program(process, json.loads(line))


@contextmanager
def server(command: list[str], health: str, **environment: str) -> Iterator[Program]:
    """Run ``command`` until the block ends; wait until the URL ``health`` answers."""
    quiet = subprocess.DEVNULL  # ours say why they end; others chat
    with _running(command, quiet, os.environ | environment, stderr=quiet) as process:
        latest = time.monotonic() + START_MAX
        while not _answers(health):
            if process.poll() is not None or time.monotonic() > latest:
                raise RuntimeError(f"{command[0]} does not answer at {health}")
            time.sleep(0.2)
        yield Program(process, {})


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def allow_files() -> None:
    """Let this process and those it starts open as many files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU time that a process has used so far."""
    # Its CPU clock, to the nanosecond: /proc counts in steps of 10 ms.  See
    # clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


def cpu_of_all(pid: int) -> float:
    """Return the same of a process and its children."""
    return sum(cpu_of(each.pid) for each in _tree(pid))


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _running(
    command: list[str],
    stdout: int,
    environment: Mapping[str, str] = os.environ,
    stdin: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            # Its children, too; itself first, because it may start others.
            running = [] if process.poll() is not None else _tree(process.pid)
            for each in running:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
