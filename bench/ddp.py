"""Training steps of DistributedDataParallel, and what a lost rank costs.

A small language model (1.4 million parameters) on three ranks of this machine, with one
thread each.  The same processes train one copy over gloo and one over Shoal, as under
``shoal train``, and take turns.  Then the last rank kills or stops itself in the middle
of a step: the pause is how much longer than the median of its steps the longest step of
rank 0 takes afterwards.  Gloo would end all ranks, or wait for its time limit.
"""

import json
import sys
from collections import defaultdict
from contextlib import ExitStack

from processes import HERE, free_port, program
from report import Goal, Results

sys.path.insert(0, str(HERE.parent / "tests"))

from training.run_server import serving  # hosts a run, as the coordinator does

ROUNDS = 3
RANKS = 3
FAULTS = ("killed", "paused")

STEP = "{backend}: ms a step"
PAUSE = "pause when a rank is {fault}: s"
GOALS = [
    Goal(
        STEP.format(backend="gloo"),
        STEP.format(backend="shoal"),
        at_least=1.0,
    ),
    Goal(PAUSE.format(fault="killed"), at_most=1.1),
    Goal(PAUSE.format(fault="paused"), at_most=3.0),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        for fault in FAULTS:
            found = train(fault)
            for backend, seconds in found["steps"].items():
                results[STEP.format(backend=backend)].append(seconds * 1e3)
            results[PAUSE.format(fault=fault)].append(found["pause"]["s"])
    return dict(results)


def train(fault: str) -> dict[str, dict[str, float]]:
    """Start the ranks, and return what rank 0 measured."""
    port = str(free_port())
    script = str(HERE / "ddp_rank.py")
    with ExitStack() as stack, serving(RANKS) as server:
        members = []
        for rank in reversed(range(RANKS)):
            run = [
                f"{name}={value}"
                for name, value in server.environment(rank).items()
                if name.startswith(("SHOAL_RUN", "RANK", "WORLD", "OMP"))
            ]
            place = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]
            started = program(script, fault, within=("env", *run, *place))
            members.append(stack.enter_context(started))
        first = members[-1]
        assert first.process.stdout is not None
        found: dict[str, dict[str, float]] = json.loads(first.process.stdout.readline())
        return found
