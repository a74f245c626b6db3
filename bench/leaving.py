"""1,000 clients that leave: how soon their worker knows, and works for somebody else.

A node with 250 slots joins over a real WebSocket.  250 clients each wait in the queue,
wait for the first output, read a stream, or wait for a whole answer; those of one kind
hang up all at once, while others are in the queue.  *told*: until the node is told to
stop.  *free*: until it is given the job of one who waited, or, for those in the queue,
until the coordinator counts them no more.
"""

import asyncio
import json
import math
import statistics
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.request import Request, urlopen

from engine import TEXT as PIECE
from load import OPENING_AT_ONCE, PATIENCE, READ_MAX, request, run
from node import BINARY, KEEPALIVE, TEXT, frame, join, receive
from processes import program
from report import Goal, Results

ROUNDS = 5
CLIENTS = 250  # of each kind
POLL = 0.002  # seconds between looks at the queue

QUEUED, WAITING = "queued", "waiting for the first output"
STREAMING, WHOLE, LAST = "streaming", "not streaming", "last"
BEGUN = (STREAMING, WHOLE, LAST)  # whose answers the node begins

TOLD, FREE = "told", "free"
MEASURED = [(QUEUED, FREE)] + [
    (kind, what) for kind in (WAITING, STREAMING, WHOLE) for what in (TOLD, FREE)
]
GOALS = [Goal(f"{kind}, {what}: p99 ms", at_most=1000) for kind, what in MEASURED]

Found: TypeAlias = dict[tuple[str, str], list[float]]
"""The seconds that each client's leaving took, by kind and what was waited for."""


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            where = ["--port", "0", "--data-dir", folder, "--json"]
            secrets = ["--api-key", "k", "--join-token", "t", "--log-level", "error"]
            patient = ["--queue-wait", str(PATIENCE)]
            serve = ["-m", "shoal", "serve", *where, *secrets, *patient]
            with program(*serve) as coordinator:
                found = run(_round(coordinator.report["ports"]["http"]))
        for kind, what in MEASURED:
            for figure, value in _figures(found[kind, what]).items():
                results[f"{kind}, {what}: {figure} ms"].append(value * 1e3)
    return results


def _figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"p50": statistics.median(ordered), "p99": p99, "max": ordered[-1]}


@dataclass(slots=True)
class Node:
    """A node that begins answers and ends none; it notes when it hears what.

    ``given`` and ``told`` say when each question came, and when it was to be stopped.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    given: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    received: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        questions: dict[int, str] = {}
        while True:
            opcode, payload = await receive(self.reader)
            now = time.perf_counter()
            if opcode != TEXT:
                continue
            task = json.loads(payload)
            number = task["id"]
            if "stop" in task:
                self.told[questions[number]] = now
            else:
                question = questions[number] = task["messages"][-1]["content"]
                self.given[question] = now
                if question.startswith(BEGUN):
                    text = struct.pack("!I", number) + PIECE.encode()
                    self.writer.write(frame(BINARY, text))
            self.received.set()

    async def until(self, so: Callable[[], bool]) -> None:
        while not so():
            self.received.clear()
            await self.received.wait()


@dataclass(slots=True)
class ClientGroup:
    """Clients of one kind, by question, each with a request under way."""

    kind: str
    clients: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]]

    async def read_first(self) -> None:
        """Wait until each has read the first text of its answer."""
        for reader, _ in self.clients.values():
            answer = b""
            while PIECE.encode() not in answer:
                data = await reader.read(READ_MAX)
                if not data:
                    raise RuntimeError(f"the server hung up after {answer[-400:]!r}")
                answer += data

    def leave(self) -> dict[str, float]:
        """Hang up, all of them; return when each did."""
        left = {}
        for question, (_, writer) in self.clients.items():
            left[question] = time.perf_counter()
            writer.close()
        return left


async def _start_clients(port: int, kind: str) -> ClientGroup:
    """Have ``CLIENTS`` of them ask; their questions are told apart by number."""
    few = asyncio.Semaphore(OPENING_AT_ONCE)
    group = ClientGroup(kind, {})

    async def ask(question: str) -> None:
        async with few:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(question, key="k", stream=kind != WHOLE))
        group.clients[question] = reader, writer

    await asyncio.gather(*(ask(f"{kind} {number}") for number in range(CLIENTS)))
    return group


async def _round(port: int) -> Found:
    node = Node(*await join(port, "n", slots=CLIENTS))
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(node.listen())
        found = await _leave_in_turn(port, node)
        listening.cancel()
    node.writer.close()
    if strays := [each for each in node.given if each.startswith(QUEUED)]:
        raise RuntimeError(f"{len(strays)} were given away although they had left")
    if len(node.told) != 3 * CLIENTS:
        raise RuntimeError(f"the node was told to stop {len(node.told)} jobs")
    return found


async def _leave_in_turn(port: int, node: Node) -> Found:
    group = await _start_clients(port, WAITING)
    await node.until(lambda: group.clients.keys() <= node.given.keys())
    following = await _start_clients(port, STREAMING)
    await _until_queued(port, CLIENTS)
    queued = await _start_clients(port, QUEUED)
    await _until_queued(port, 2 * CLIENTS)
    found = {(QUEUED, FREE): await _unqueued(port, queued)}
    found |= await _replace_clients(node, group, following)
    for kind in (WHOLE, LAST):
        node.writer.write(KEEPALIVE)
        group, following = following, await _start_clients(port, kind)
        await _until_queued(port, CLIENTS)
        if group.kind == STREAMING:
            await group.read_first()
        found |= await _replace_clients(node, group, following)
    following.leave()
    return found


async def _replace_clients(
    node: Node, group: ClientGroup, following: ClientGroup
) -> Found:
    """Have those leave whom the node works for; wait until it works for the next."""
    left = group.leave()
    await node.until(
        lambda: (
            left.keys() <= node.told.keys()
            and following.clients.keys() <= node.given.keys()
        )
    )
    given = sorted(node.given[question] for question in following.clients)
    # Whose slot went to whom nobody says: the first that left is taken for the first.
    return {
        (group.kind, TOLD): [node.told[each] - at for each, at in left.items()],
        (group.kind, FREE): [
            at - gone for at, gone in zip(given, left.values(), strict=True)
        ],
    }


async def _unqueued(port: int, group: ClientGroup) -> list[float]:
    """Have those leave who are in the queue; return how long each was still counted."""
    before = await asyncio.to_thread(_queued, port)
    left = list(group.leave().values())
    seconds: list[float] = []
    while len(seconds) < CLIENTS:
        gone = before - await asyncio.to_thread(_queued, port)
        now = time.perf_counter()
        seconds += [now - at for at in left[len(seconds) : gone]]
        await asyncio.sleep(POLL)
    return seconds


async def _until_queued(port: int, jobs: int) -> None:
    # It is another process that counts.
    while await asyncio.to_thread(_queued, port) != jobs:  # noqa: ASYNC110
        await asyncio.sleep(POLL)


def _queued(port: int) -> int:
    status = f"http://127.0.0.1:{port}/admin/status"
    with urlopen(Request(status, headers={"Authorization": "Bearer k"})) as answer:
        count: int = json.load(answer)["jobs"]["queued"]
    return count
