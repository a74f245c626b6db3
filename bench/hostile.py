"""Chats beside one client that does its worst: how much longer do they take?

A node over a real WebSocket answers with 25 chunks, 20 ms apart; sixteen clients ask
it, one chat after the other: some 370 chats in a window, so that the p99 is not the
longest.  Meanwhile another process floods the coordinator
(tests/attacks/flooding.py): with chats of 14 MiB or with 16,000 images on four
connections, with compressed bodies, with messages of 100,000 function calls, with
twenty streams that it leaves unread, or as sixty connections that send one byte at a
time.  The control has no flood: a process burns as much CPU time as the flood and what
the coordinator did for it.
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
from contextlib import contextmanager

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
KINDS = ("chats", "images", "bombs", "calls", "unread", "slow")

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

GOALS = [
    Goal(f"{kind}: p99 ms", f"{kind}, control: p99 ms", at_most=1.2) for kind in KINDS
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
    return results


def _compare(kind: str, coordinator: Program, number: int, out: Results) -> None:
    """Measure chats beside a flood, and beside a process that burns as much."""
    quiet, _ = _window(coordinator)
    with _flood(kind, coordinator.report["url"]) as flood:
        before = _cpu(flood)
        busy, took = _window(coordinator)
        spent = _cpu(flood) - before + busy - quiet
    out[f"{kind}: p99 ms"].append(took)
    with _burning(max(0.0, spent / WINDOW)):
        _, took = _window(coordinator)
    out[f"{kind}, control: p99 ms"].append(took)
    out[f"{kind}: CPU of the coordinator, %"].append(100 * busy / WINDOW)
    out["without either: CPU of the coordinator, %"].append(100 * quiet / WINDOW)


@contextmanager
def _flood(kind: str, url: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "attacks.flooding", kind, url]
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


def _window(coordinator: Program) -> tuple[float, float]:
    """Return the coordinator's CPU seconds in a window, and the p99 of chats in ms."""
    before = coordinator.cpu()
    took = run(_chats(coordinator.report["ports"]["http"]))
    ordered = sorted(took)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return coordinator.cpu() - before, 1e3 * p99


async def _chats(port: int) -> list[float]:
    """Return how long each chat of a window took, in seconds."""
    took: list[float] = []
    node = f"token={TOKEN}&model=m&max_concurrency={SLOTS}&name=n"
    reader, writer = await upgrade(port, f"/ws?{node}")
    until = time.perf_counter() + WINDOW
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(_answer(reader, writer))
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(_ask(port, until, took))
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


async def _ask(port: int, until: float, took: list[float]) -> None:
    asked = request("a question", key=KEY, stream=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(asked)
        answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        if answer.count(PIECE.encode()) != CHUNKS:
            raise RuntimeError(f"not the whole answer: {answer[-400:]!r}")
        took.append(time.perf_counter() - began)
    writer.close()
