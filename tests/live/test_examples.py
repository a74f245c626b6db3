"""The examples, run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

from harness.speed import scaled
from live.programs import KEY, Programs

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = "join-me-please"
FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")


def test_example_counts_primes_on_a_worker(programs: Programs) -> None:
    example = EXAMPLES / "count_primes.py"
    coordinator = programs.serve("--join-token", LONG, *FLEET)
    worker = coordinator.join("one", "--tasks", str(example), token=LONG)
    assert worker.event("joined")["tasks"] == ["count_primes.primes_from"]

    counted = subprocess.run(
        [sys.executable, example],
        capture_output=True,
        text=True,
        check=True,
        timeout=scaled(60),
        env={**os.environ, "SHOAL_URL": coordinator.url, "SHOAL_API_KEY": KEY},
    )

    assert counted.stdout == "78498\n"
