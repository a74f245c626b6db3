"""A process of a script, whose output is reported, and which may fail."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import IO

from shoal.domain.errors import ShoalError
from shoal.processes.programs import describe_exit
from shoal.training.launch import script_start
from shoal.training.launch.member_reports import MemberReports
from shoal.training.launch.script_lines import (
    BAR_END,
    OutputLines,
    hash_in,
    values_in,
)

STOP_TIMEOUT = 10.0  # seconds that a process has to end after SIGTERM
STDERR_LINES = 20  # of a failed process, in the error
READ_SIZE = 1 << 16  # bytes
ERROR_MAX = 4000  # characters of the error

_RANK = re.compile(r"^\[rank\d+\]: ")  # as PyTorch begins each line
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*: ")  # the line after a traceback


class ScriptFailed(ShoalError):
    """A process of a script ended with another status than 0."""


class RankProcess:
    """A process of a script, whose output is reported line by line."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        reports: MemberReports,
    ) -> None:
        self.rank = rank
        self.last_errors: deque[str] = deque(maxlen=STDERR_LINES)
        self._reports = reports
        starter = str(Path(script_start.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", starter, str(os.getpid()), *command],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream, keep), daemon=True)
            for stream, keep in (
                (self._process.stdout, False),
                (self._process.stderr, True),
            )
        ]
        for each in self._readers:
            each.start()

    @property
    def status(self) -> int | None:
        """Its exit status; negative: the signal that ended it."""
        return self._process.returncode

    def wait(self) -> None:
        """Wait for its end, and for all of its output."""
        self._process.wait()
        for each in self._readers:
            each.join(STOP_TIMEOUT)  # its own children may keep the pipes open

    def terminate(self) -> None:
        """Ask it to end, if it still runs."""
        self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait for its end; after a while, kill it."""
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, stream: IO[bytes], keep: bool) -> None:
        lines = OutputLines()
        with stream:
            while data := os.read(stream.fileno(), READ_SIZE):
                for line in lines.feed(data):
                    self._on_line(line, keep)
        for line in lines.end():
            self._on_line(line, keep)

    def _on_line(self, line: str, keep: bool) -> None:
        if line.endswith(BAR_END):
            self._reports.bar(self.rank, line)
            return
        if (found := hash_in(line)) is not None:
            self._reports.hash(self.rank, *found)
            return
        values, shown = values_in(line)
        if values:
            self._reports.values(self.rank, values)
        if keep:
            self.last_errors.append(line)
        if shown:
            self._reports.line(self.rank, line)


def describe_failure(process: "RankProcess", script: str) -> str:
    """Return how a process has failed, with its last lines of standard error."""
    text = (
        f"rank {process.rank} of {script} on {gethostname()} "
        f"{describe_exit(process.status)}"
    )
    if process.last_errors:
        text += "; its last lines:\n" + "\n".join(process.last_errors)
    if len(text) > ERROR_MAX:
        text = f"{text[: ERROR_MAX // 4]}\n[…]\n{text[-3 * ERROR_MAX // 4 :]}"
    return text


def headline(error: str) -> str:
    """Return the first line of a failure, and the one that names its exception."""
    first, _, rest = error.partition("\n")
    first = first.removesuffix("; its last lines:")
    if signal.SIGKILL.name in first:  # of which it could say nothing
        return first
    lines = [_RANK.sub("", each) for each in rest.rstrip().split("\n")]
    named = [each for each in lines if _EXCEPTION.match(each)]
    last = (named or lines)[-1]
    return f"{first}: {last}" if last else first
