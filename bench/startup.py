"""Seconds until `shoal --help` has answered, and until `shoal serve` is ready."""

import subprocess
import sys
import tempfile
import time

from processes import program
from report import Goal, Results

ROUNDS = 7


HELP = "shoal --help: s"
READY = "shoal serve until ready: s"
GOALS = [Goal(HELP, at_most=0.15), Goal(READY, at_most=1)]


def measure(rounds: int) -> Results:
    helps, serves = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "shoal", "--help"], check=True, capture_output=True
        )
        helps.append(time.perf_counter() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            with program(
                *("-m", "shoal", "serve", "--port", "0", "--data-dir", folder),
                *("--json", "--log-level", "warning"),
            ):
                serves.append(time.perf_counter() - began)
    return {HELP: helps, READY: serves}
