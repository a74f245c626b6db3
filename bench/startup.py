"""Seconds until `shoal --help` has answered, and until `shoal serve` is ready."""

import subprocess
import sys
import tempfile
import time

from processes import program

ROUNDS = 7


def measure() -> dict[str, list[float]]:
    helps, serves = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "shoal", "--help"], check=True, capture_output=True
        )
        helps.append(time.perf_counter() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            with program(
                "-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"
            ):
                serves.append(time.perf_counter() - began)
    return {"shoal --help, s": helps, "shoal serve until ready, s": serves}
