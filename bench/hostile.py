"""Chats beside one client that does its worst: how much longer do they take?

A node over a real WebSocket answers with 25 chunks, 20 ms apart; sixteen clients ask
it, one chat after the other: some 370 chats in a window, so that the p99 is not the
longest.  Meanwhile another process floods the coordinator
(tests/attacks/flooding.py): with chats of 14 MiB or with 16,000 images on four
connections, with compressed bodies, with messages of 100,000 function calls, with
twenty streams that it leaves unread, as sixty connections that send one byte at a time,
or with ten keys that read lists as fast as they may.  The control has no flood: a
process burns as much CPU time as the flood and what the coordinator did for it.

*New chats* open a connection each, with a key, while strangers without one do the same
(tests/attacks/knocking.py): a hundred requests a second for /healthz from the address
of those clients; from another one, connections that are reset at once, or after the
head of a request, as many as 15 % of a core can make.  *Strangers* is what they cost
the coordinator.  *Burst*: a thousand connections at once, each with a request and a
key.
"""

import asyncio
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import psutil

from engine import TEXT as PIECE
from load import request, run
from node import BINARY, TEXT, frame, receive, upgrade
from processes import HERE, Program, program
from report import Goal, Results

ROUNDS = 3
CLIENTS = 16
SLOTS = 2 * CLIENTS  # of the node: the flood takes none from the clients
WINDOW = 12.0  # seconds
CHUNKS, PACE = 25, 0.02  # of an answer, and seconds between two
TURN = 0.01  # seconds, of which the control burns a part
KINDS = ("chats", "images", "bombs", "calls", "unread", "slow", "lists")
KNOCKS = ("health", "resets", "hits")
BURST = 1000  # connections at once

# Those of the flood.
KEY = "sk-test-uZ5kq2Xv8RbN4tYw7Hc3"
TOKEN = "join-token-that-no-log-may-hold"

BURN = """
import sys, time
part = float(sys.argv[1])
while True:
    began = time.process_time()
    while time.process_time() - began < part * {turn}:
        pass
    time.sleep((1 - part) * {turn})
"""

NEW = "{kind}: p99 ms of a new chat"
NEW_CONTROL = "{kind}, control: p99 ms of a new chat"
STRANGERS = "{kind}: strangers, % of a core"
HELD = "{kind}: strangers, MB"
ANSWERED = "burst: answers to {} at once"
GOALS = [
    *(
        Goal(f"{kind}: p99 ms", f"{kind}, control: p99 ms", at_most=1.2)
        for kind in KINDS
    ),
    *(
        goal
        for kind in KNOCKS
        for goal in (
            Goal(NEW.format(kind=kind), NEW_CONTROL.format(kind=kind), at_most=1.5),
            Goal(STRANGERS.format(kind=kind), at_most=5.0),
            Goal(HELD.format(kind=kind), at_most=64.0),
        )
    ),
    Goal(ANSWERED.format(BURST), at_least=float(BURST)),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        secrets = ["--api-key", KEY, "--join-token", TOKEN, "--data-dir", folder]
        serve = ["-m", "shoal", "serve", "--port", "0", "--json", *secrets]
        with program(*serve, "--log-level", "error") as coordinator:
            for number in range(rounds):
                for kind in KINDS:
                    _compare(kind, coordinator, number, results)
                for kind in KNOCKS:
                    _compare_new(kind, coordinator, results)
                port = coordinator.report["ports"]["http"]
                results[ANSWERED.format(BURST)].append(run(_burst(port)))
    return results


def _compare(kind: str, coordinator: Program, number: int, out: Results) -> None:
    """Measure chats beside a flood, and beside a process that burns as much."""
    quiet, _ = _window(coordinator)
    with flood(kind, coordinator.report["url"]) as attacker:
        before = _cpu(attacker)
        busy, took = _window(coordinator)
        spent = _cpu(attacker) - before + busy - quiet
    out[f"{kind}: p99 ms"].append(took)
    with _burning(max(0.0, spent / WINDOW)):
        _, took = _window(coordinator)
    out[f"{kind}, control: p99 ms"].append(took)
    out[f"{kind}: CPU of the coordinator, %"].append(100 * busy / WINDOW)
    out["without either: CPU of the coordinator, %"].append(100 * quiet / WINDOW)


def _compare_new(kind: str, coordinator: Program, out: Results) -> None:
    """Measure chats on new connections beside strangers, and beside as much work."""
    quiet, _ = _window(coordinator, fresh=True)
    before = coordinator.memory()
    with _knocking(kind, coordinator.report["ports"]) as strangers:
        began = _cpu(strangers)
        busy, took = _window(coordinator, fresh=True)
        spent = _cpu(strangers) - began + busy - quiet
        out[HELD.format(kind=kind)].append(coordinator.memory() - before)
    out[NEW.format(kind=kind)].append(took)
    out[STRANGERS.format(kind=kind)].append(100 * (busy - quiet) / WINDOW)
    with _burning(max(0.0, spent / WINDOW)):
        _, took = _window(coordinator, fresh=True)
    out[NEW_CONTROL.format(kind=kind)].append(took)


def flood(kind: str, url: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Flood a coordinator that has ``KEY`` and ``TOKEN`` within the block."""
    return _attacking("attacks.flooding", kind, url)


def _knocking(
    kind: str, ports: dict[str, int]
) -> AbstractContextManager["subprocess.Popen[str]"]:
    at = str(ports["http"]), str(ports["tealenet"])
    return _attacking("attacks.knocking", kind, *at)


@contextmanager
def _attacking(module: str, kind: str, *at: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", module, kind, *at]
    tests = HERE.parent / "tests"
    with subprocess.Popen(
        command, cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the flood of {kind} ended before it began")
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _burning(cores: float) -> Iterator[None]:
    """Burn so much CPU time within the block."""
    count = math.ceil(cores) or 1
    command = [sys.executable, "-c", BURN.format(turn=TURN), str(cores / count)]
    burning = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in burning:
            each.kill()
            each.wait()


def _cpu(process: "subprocess.Popen[str]") -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def _window(coordinator: Program, *, fresh: bool = False) -> tuple[float, float]:
    """Return the coordinator's CPU seconds in a window, and the p99 of chats in ms.

    ``fresh``: each has a connection of its own.
    """
    before = coordinator.cpu()
    took = run(_chats(coordinator.report["ports"]["http"], fresh=fresh))
    ordered = sorted(took)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return coordinator.cpu() - before, 1e3 * p99


async def _chats(port: int, *, fresh: bool) -> list[float]:
    """Return how long each chat of a window took, in seconds."""
    took: list[float] = []
    node = f"token={TOKEN}&model=m&max_concurrency={SLOTS}&name=n"
    reader, writer = await upgrade(port, f"/ws?{node}")
    until = time.perf_counter() + WINDOW
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(_answer(reader, writer))
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(_ask(port, until, took, fresh=fresh))
        answering.cancel()
    writer.close()
    return took


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a node, with paced chunks."""

    async def work(task: int) -> None:
        number = struct.pack("!I", task)
        for _ in range(CHUNKS):
            await asyncio.sleep(PACE)
            writer.write(frame(BINARY, number + PIECE.encode()))
        writer.write(frame(BINARY, number))

    async with asyncio.TaskGroup() as working:
        while True:
            opcode, payload = await receive(reader)
            task = json.loads(payload) if opcode == TEXT and payload else {}
            if "id" in task and "stop" not in task:
                working.create_task(work(task["id"]))


async def _ask(port: int, until: float, took: list[float], *, fresh: bool) -> None:
    asked = request("a question", key=KEY, stream=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        if fresh:
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked)
        answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        if answer.count(PIECE.encode()) != CHUNKS:
            raise RuntimeError(f"not the whole answer: {answer[-400:]!r}")
        took.append(time.perf_counter() - began)
    writer.close()


async def _burst(port: int) -> float:
    """Return how many of many requests on new connections at once are answered."""
    asked = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n"

    async def ask() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked.encode())
            line = await reader.readline()
        except OSError:
            return False
        writer.close()
        return b" 200 " in line

    return float(sum(await asyncio.gather(*(ask() for _ in range(BURST)))))
