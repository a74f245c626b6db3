"""Programs that a bench starts, and the CPU time they use."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Program:
    """A running program and the JSON line it began with."""

    process: subprocess.Popen[str]
    said: dict[str, Any]

    def cpu(self) -> float:
        """Return the seconds of CPU time it has used so far (Linux only)."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    """Run Python with ``arguments`` until the block ends; wait for its first line."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Program(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()
