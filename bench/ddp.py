"""Training steps of DistributedDataParallel, and what a lost rank costs.

A small language model (1.4 million parameters) on three ranks of this machine, with one
thread each.  The same processes train one copy over gloo and one over Shoal, as under
``shoal train``, or torchft 0.2.0, and take turns.  Then the last rank kills or stops
itself in the middle of a step: the pause is how much longer than the median of its
steps the longest step of rank 0 takes afterwards.  Gloo would end all ranks, or wait
for its time limit.  CPU is that of rank 0.

torchft, of which there are wheels for Linux on x86-64 alone, gets a second to form a
quorum and 10 s for an operation, and waits for each bucket by a hook of this bench: its
own ends with an AssertionError when a rank is lost (bench/ddp_torchft.py).
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from peers import environment
from processes import HERE, free_port, program
from report import Goal, Results

sys.path.insert(0, str(HERE.parent / "tests"))

from training.run_server import serving  # hosts a run, as the coordinator does

ROUNDS = 3
RANKS = 3
ENGINES = ("shoal", "torchft")
FAULTS = ("killed", "paused")
# The docstring names the version too.
TORCHFT = ("torchft==0.2.0", "torch==2.13.0", "numpy")

STEP = "{engine}: ms a step"
GLOO = "gloo beside {engine}: ms a step"
CPU = "{engine}: CPU ms a step"
GLOO_CPU = "gloo beside {engine}: CPU ms a step"
PAUSE = "{engine}, pause when a rank is {fault}: s"
GOALS = [
    Goal(GLOO.format(engine="shoal"), STEP.format(engine="shoal"), at_least=1.0),
    Goal(GLOO_CPU.format(engine="shoal"), CPU.format(engine="shoal"), at_least=1.0),
    Goal(GLOO.format(engine="torchft"), STEP.format(engine="torchft")),
    Goal(PAUSE.format(engine="shoal", fault="killed"), at_most=1.1),
    Goal(PAUSE.format(engine="shoal", fault="paused"), at_most=3.0),
    *(
        Goal(
            PAUSE.format(engine="torchft", fault=fault),
            PAUSE.format(engine="shoal", fault=fault),
            at_least=1.0,
        )
        for fault in FAULTS
    ),
]


def measure(rounds: int) -> Results:
    pythons = {"shoal": sys.executable, "torchft": environment("torchft", *TORCHFT)}
    results: Results = defaultdict(list)
    for _ in range(rounds):
        for fault in FAULTS:
            for engine in ENGINES:
                found = train(engine, fault, pythons[engine])
                for rows, name in (((STEP, CPU), engine), ((GLOO, GLOO_CPU), "gloo")):
                    for row, seconds in zip(rows, found["steps"][name], strict=True):
                        results[row.format(engine=engine)].append(seconds * 1e3)
                row = PAUSE.format(engine=engine, fault=fault)
                results[row].append(found["pause"]["s"])
    return dict(results)


def train(engine: str, fault: str, python: str) -> dict[str, dict[str, Any]]:
    """Start the ranks, and return what rank 0 measured."""
    script = str(HERE / "ddp_rank.py")
    place = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]
    with ExitStack() as stack, environments(engine) as ranks:
        members = []
        for rank in reversed(ranks):
            variables = [f"{name}={value}" for name, value in rank.items()]
            within = ("env", *variables, *place)
            started = program(script, engine, fault, within=within, python=python)
            members.append(stack.enter_context(started))
        first = members[-1]
        assert first.process.stdout is not None
        found: dict[str, dict[str, Any]] = json.loads(first.process.stdout.readline())
        return found


@contextmanager
def environments(engine: str) -> Iterator[list[Mapping[str, str]]]:
    """Yield the variables of each rank, and host the run of Shoal's."""
    if engine == "shoal":
        with serving(RANKS) as server:
            yield [_changed(server.environment(rank)) for rank in range(RANKS)]
    else:
        size = {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        yield [{"RANK": str(rank), **size} for rank in range(RANKS)]


def _changed(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that differ from the ones of this process."""
    before = os.environ
    return {name: text for name, text in variables.items() if before.get(name) != text}
