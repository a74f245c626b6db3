"""5,000 idle workers: what they cost a coordinator, and how soon a dead one is missed.

They are GrandSage nodes in two processes of their own, which say a word every 10 s.
One more falls silent without hanging up, until its lease of 30 s is over.
"""

import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack

from load import run
from node import KEEPALIVE, join, receive
from processes import HERE, program
from report import Goal, Results

ROUNDS = 5
WORKERS = 5000
PROCESSES = 2
SETTLE = 5.0  # seconds after the last has joined
CLOSE = 8  # an opcode of RFC 6455

SHARE = f"coordinator with {WORKERS} workers: % of a core"
EACH = "memory: KB a worker"
JOINED = f"until all {WORKERS} have joined: s"
MISSED = "until a worker that fell silent is given up: s"

GOALS = [
    Goal(SHARE, at_most=10),
    Goal(EACH, at_most=30),
    Goal(MISSED, at_most=31),  # its lease, and a second to act on it
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        _round(results)
    return results


def _round(results: Results) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = ["--port", "0", "--data-dir", folder, "--join-token", "t"]
        quiet = ["--log-level", "error", "--json"]
        coordinator = stack.enter_context(
            program("-m", "shoal", "serve", *where, *quiet)
        )
        port = coordinator.said["ports"]["http"]
        memory, began = coordinator.memory(), time.perf_counter()
        for _ in range(PROCESSES):
            nodes = [str(HERE / "node.py"), str(port), str(WORKERS // PROCESSES)]
            stack.enter_context(program(*nodes))
        results[JOINED].append(time.perf_counter() - began)
        time.sleep(SETTLE)
        cpu, began = coordinator.cpu(), time.perf_counter()
        results[MISSED].append(run(_until_missed(port)))
        seconds = time.perf_counter() - began
        results[SHARE].append((coordinator.cpu() - cpu) / seconds * 100)
        grown = coordinator.memory() - memory
        results[EACH].append(grown / WORKERS * 1e3)


async def _until_missed(port: int) -> float:
    """Join, say one word and then nothing; return the seconds that this is borne."""
    reader, writer = await join(port, "silent")
    writer.write(KEEPALIVE)
    began = time.perf_counter()
    opcode, reason = await receive(reader)
    if opcode != CLOSE:
        raise RuntimeError(f"expected to be hung up on, not told {reason!r}")
    writer.close()
    return time.perf_counter() - began
