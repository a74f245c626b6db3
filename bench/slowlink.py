"""Two ranks train a model over 50 Mbit/s and 20 ms each way: dense, compressed, DiLoCo.

Each rank has a network namespace (Linux, as root), and so has a relay between them that
delays what it passes on; `tc tbf` limits the four ends of their links to 50 Mbit/s.
The model predicts the characters of this project's documents: 4.3 million parameters,
64 samples a rank and step, 1,500 steps of AdamW in each row with a loss, which is that
of 20,000 characters that no rank has trained on.  Top-k sends 3 % of the gradients,
which AdamW averages over fewer steps (its first beta is 0.2); DiLoCo exchanges int8
differences after 25 steps, with an outer momentum of 0.5.  The loss of dense steps is
the same over any link: it is measured over loopback, and their time in a few steps.
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from processes import HERE, Program, program
from report import Goal, Results

Row: TypeAlias = dict[str, Any]
"""What rank 0 of ``slowlink_rank.py`` prints of a run."""

ROUNDS = 1
STEPS = 1500
TIMED_STEPS = 12  # of a run whose loss is known
DELAY = 0.02  # seconds
SHAPE = "tbf rate 50mbit burst 64kb latency 200ms"
PORT = 7000  # of each rank, in its own namespace
NAMESPACES = ("shoal-bench-0", "shoal-bench-1")
RELAY = "shoal-bench-relay"
DOCUMENTS = HERE.parent / "docs"

TIME = "{name}: ms a step"
COST = "{name}: CPU ms a step of a rank"
LOSS = "{name}: loss"
TRAINED = ("top-k", "DiLoCo")  # to the end, over the link
TIMED = ("dense", "fp16", "int8")
GOALS = [
    goal
    for name in TRAINED
    for goal in (
        Goal(TIME.format(name="dense"), TIME.format(name=name), at_least=10),
        Goal(LOSS.format(name=name), LOSS.format(name="dense"), at_most=1.01),
    )
] + [Goal(TIME.format(name="dense"), TIME.format(name=name)) for name in TIMED[1:]]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    runs = dict.fromkeys(TIMED, TIMED_STEPS) | dict.fromkeys(TRAINED, STEPS)
    for _ in range(rounds):
        for row in over_loopback({"dense": STEPS}):
            results[LOSS.format(**row)].append(row["loss"])
        for row in over_slow_link(runs):
            results[TIME.format(**row)].append(row["seconds"] * 1e3)
            results[COST.format(**row)].append(row["cpu"] * 1e3)
            if row["name"] in TRAINED:
                results[LOSS.format(**row)].append(row["loss"])
    return dict(results)


def over_loopback(runs: dict[str, int]) -> Iterator[Row]:
    """Yield the results of runs of so many steps."""
    with ExitStack() as stack:
        ranks = [start(stack, rank, "127.0.0.1", 0, runs) for rank in range(2)]
        yield from results_of(ranks, ["127.0.0.1"] * 2)


def over_slow_link(runs: dict[str, int]) -> Iterator[Row]:
    """Yield the results of runs of so many steps, between namespaces."""
    with ExitStack() as stack:
        stack.enter_context(namespaces())
        ranks = [
            start(stack, rank, f"10.99.{rank}.1", PORT, runs, within=inside(namespace))
            for rank, namespace in enumerate(NAMESPACES)
        ]
        # A rank reaches the other one at the relay's address in its own network.
        ports = [str(each.report["port"]) for each in ranks]
        stack.enter_context(
            program(
                *(str(HERE / "slowlink_relay.py"), str(DELAY)),
                *("10.99.0.2", ports[1], "10.99.1.1", ports[1]),
                *("10.99.1.2", ports[0], "10.99.0.1", ports[0]),
                within=inside(RELAY),
            )
        )
        yield from results_of(ranks, ["10.99.1.2", "10.99.0.2"])


def start(
    stack: ExitStack,
    rank: int,
    host: str,
    port: int,
    runs: dict[str, int],
    within: Sequence[str] = (),
) -> Program:
    plan = [f"{name}={steps}" for name, steps in runs.items()]
    script = str(HERE / "slowlink_rank.py")
    arguments = (script, str(DOCUMENTS), str(rank), host, str(port), *plan)
    return stack.enter_context(
        program(*arguments, within=within, stdin=subprocess.PIPE)
    )


def results_of(ranks: Sequence[Program], hosts: Sequence[str]) -> Iterator[Row]:
    """Tell the ranks where the others reach them, and yield what rank 0 prints."""
    addresses = [
        [[host], each.report["port"], each.report["id"]]
        for each, host in zip(ranks, hosts, strict=True)
    ]
    for each in ranks:
        assert each.process.stdin is not None
        each.process.stdin.write(json.dumps(addresses) + "\n")
        each.process.stdin.flush()
    first = ranks[0].process
    assert first.stdout is not None
    yield from map(json.loads, first.stdout)
    for each in ranks:
        if each.process.wait():
            raise RuntimeError("a rank failed: see above")


@contextmanager
def namespaces() -> Iterator[None]:
    """Make a namespace for each rank and for the relay, and a slow link between."""
    with ExitStack() as stack:
        for each in (*NAMESPACES, RELAY):
            execute(f"ip netns add {each}")
            stack.callback(execute, f"ip netns del {each}")
        for rank, namespace in enumerate(NAMESPACES):
            execute(
                f"ip -n {namespace} link add rank type veth peer rank{rank} "
                f"netns {RELAY}"
            )
            ends = ((namespace, "rank", 1), (RELAY, f"rank{rank}", 2))
            for where, device, number in ends:
                execute(f"ip -n {where} addr add 10.99.{rank}.{number}/24 dev {device}")
                execute(f"ip -n {where} link set {device} up")
                execute(f"tc -n {where} qdisc add dev {device} root {SHAPE}")
        yield


def inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def execute(command: str) -> None:
    subprocess.run(command.split(), check=True)
