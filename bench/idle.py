"""5,000 idle workers: what they cost a coordinator, and how soon a dead one is missed.

They are GrandSage nodes, which send a message every 10 s; in other runs workers of
Shoal's own, on TealeNet's LAN with a heartbeat every 5 s that is answered, or on our
own protocol with one every 7 s; in two processes of their own.  One more falls silent
without hanging up, until its lease of 30 s is over; on our own protocol none does.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import teale_node
from load import run
from node import KEEPALIVE, join, receive
from processes import HERE, program
from report import Goal, Results

ROUNDS = 5
WORKERS = 5000
PROCESSES = 2
SETTLE = 5.0  # seconds after the last has joined
WATCHED = 30.0  # seconds, where no worker falls silent
CLOSE = 8  # an opcode of RFC 6455

SHARE = f"coordinator with {WORKERS} workers: % of a core"
EACH = "memory: KB a worker"
JOINED = f"until all {WORKERS} have joined: s"
MISSED = "until a worker that fell silent is given up: s"

WIRES = ("grandsage", "tealenet", "shoal")
GOALS = [
    *(Goal(f"{wire}, {SHARE}", at_most=10) for wire in WIRES),
    Goal(f"grandsage, {EACH}", at_most=30),
    Goal(f"tealenet, {EACH}", at_most=30),
    Goal(f"shoal, {EACH}", at_most=30),
    # The lease, and a second to act on it.
    Goal(f"grandsage, {MISSED}", at_most=31),
    Goal(f"tealenet, {MISSED}", at_most=31),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for number in range(rounds):
        for wire in WIRES if number % 2 == 0 else reversed(WIRES):
            _round(wire, results)
    return results


def _round(wire: str, results: Results) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = ["--port", "0", "--tealenet-port", "0", "--data-dir", folder]
        quiet = ["--log-level", "error", "--json"]
        let_in = ["--join-token", "t", "--tealenet-open"]
        coordinator = stack.enter_context(
            program("-m", "shoal", "serve", *let_in, *where, *quiet)
        )
        ports = coordinator.report["ports"]
        port = ports["tealenet" if wire == "tealenet" else "http"]
        memory, began = coordinator.memory(), time.perf_counter()
        for _ in range(PROCESSES):
            nodes = [str(HERE / NODES[wire]), str(port), str(WORKERS // PROCESSES)]
            stack.enter_context(program(*nodes))
        results[f"{wire}, {JOINED}"].append(time.perf_counter() - began)
        time.sleep(SETTLE)
        cpu, began = coordinator.cpu(), time.perf_counter()
        if wire in SILENT:
            results[f"{wire}, {MISSED}"].append(run(SILENT[wire](port)))
        else:
            time.sleep(WATCHED)
        seconds = time.perf_counter() - began
        results[f"{wire}, {SHARE}"].append((coordinator.cpu() - cpu) / seconds * 100)
        grown = coordinator.memory() - memory
        results[f"{wire}, {EACH}"].append(grown / WORKERS * 1e3)


async def _node_missed(port: int) -> float:
    """Join, send one message, stay silent; return the seconds until disconnection."""
    reader, writer = await join(port, "silent")
    writer.write(KEEPALIVE)
    began = time.perf_counter()
    opcode, reason = await receive(reader)
    if opcode != CLOSE:
        raise RuntimeError(f"expected to be disconnected, not {reason!r}")
    writer.close()
    return time.perf_counter() - began


async def _worker_missed(port: int) -> float:
    """Join and say nothing more; return the seconds that this is borne."""
    reader, writer, _ = await teale_node.join(port, "silent")
    began = time.perf_counter()
    while await reader.read(teale_node.READ_MAX):
        pass
    writer.close()
    return time.perf_counter() - began


NODES = {
    "grandsage": "node.py",
    "tealenet": "teale_node.py",
    "shoal": "shoal_node.py",
}
SILENT: dict[str, Callable[[int], Coroutine[Any, Any, float]]] = {
    "grandsage": _node_missed,
    "tealenet": _worker_missed,
}
