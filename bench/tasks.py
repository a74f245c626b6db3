"""Calls of a Python function that does nothing, against Ray 2.60 and Dask 2026.8.

Each round starts each engine anew, in turns: a cluster on this machine with two
processes that run the function, and a client.  *s to the first result* is from nothing,
its servers included; *ms, one after the other* the median of 500 calls from a program
that waits for each; *calls/s, 5,000 in flight* and the CPU time for each, of all
processes, client included; *MB* is the memory of all of them afterwards (PSS).  Shoal
runs its coordinator, a worker and ``shoal.Pool``, once with calls in memory alone, as
the others have them, and once durable: each call is on disk when it is accepted, and
can be explained and asked for by its name later.
"""

import json
import subprocess
import sys
from collections import defaultdict

from peers import environment
from processes import HERE
from report import Goal, Results

ROUNDS = 5
# The docstring names the versions too.
RAY = "ray==2.60.0"
DASK = "distributed==2026.8.0"
PATIENCE = 300.0  # seconds for a round of one engine
OURS = ("shoal", "shoal durable")
ROWS = {
    "start": "s to the first result",
    "sequential": "ms, one after the other",
    "rate": "calls/s, 5,000 in flight",
    "cpu": "CPU µs a call, 5,000 in flight",
    "memory": "MB",
}

SEQUENTIAL, RATE, MEMORY = ROWS["sequential"], ROWS["rate"], ROWS["memory"]

GOALS = [
    Goal(f"shoal, {SEQUENTIAL}", f"ray, {SEQUENTIAL}", at_most=0.2),
    Goal(f"shoal, {RATE}", f"ray, {RATE}", at_least=10),
    Goal(f"shoal durable, {SEQUENTIAL}", f"ray, {SEQUENTIAL}", at_most=0.5),
    Goal(f"shoal durable, {RATE}", f"ray, {RATE}", at_least=3),
    Goal(f"shoal, {MEMORY}", f"ray, {MEMORY}", at_most=1 / 8),
    *(
        Goal(f"{ours}, {row}", f"dask, {row}")
        for ours in OURS
        for row in (SEQUENTIAL, RATE, MEMORY)
    ),
]


def measure(rounds: int) -> Results:
    pythons = {
        "ray": environment("ray", RAY, "psutil"),
        "dask": environment("dask", DASK, "psutil"),
        "shoal": None,
        "shoal durable": None,
    }
    results: Results = defaultdict(list)
    order = list(pythons)
    for _ in range(rounds):
        for engine in order:
            for what, value in _round(engine, pythons[engine]).items():
                results[f"{engine}, {ROWS[what]}"].append(value)
        order.reverse()
    return results


def _round(engine: str, python: str | None) -> dict[str, float]:
    done = subprocess.run(
        [python or sys.executable, str(HERE / "tasks_peer.py"), engine],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
