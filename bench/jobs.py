"""Jobs over HTTP to Dispatch workers that are done at once, with receipts and without.

Shoal with keys, queue, prices, accounts, durable records (SQLite, fully synchronised),
and each receipt verified, countersigned and logged, against a bare aiohttp relay of the
same messages (bench/yardstick_jobs.py), alternating.  Clients and workers are one
process, and a worker does one job at a time, as the original's do.  *jobs/s*: 64
clients commit jobs, and the clock stops when the last receipt is in the log.  *burst*:
64 clients commit one job each at once to 4 workers, and wait for its result.  The
original coordinator was measured apart, on another day: 83 to 139 jobs/s with receipts,
590 to 790 without, and 14 to 18 s for the last of such a burst.
"""

import asyncio
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

from load import run
from processes import HERE, Program, program
from provider import Provider
from report import Goal, Results

ROUNDS = 5
CLIENTS = 64
JOBS = {1: 600, 32: 3000}  # of a round, by workers
BURST_WORKERS = 4
POLL = 0.05  # seconds between looks at the log, each of which costs as much as a job

WITH, WITHOUT = "with receipts", "without receipts"
BODY = json.dumps(
    {
        "job_type": "TASK",
        "user_id": "u",
        "payload": {"task_type": "classify", "input": "This product is amazing."},
    }
).encode()

RATE = "{workers} workers, {what}: jobs/s"
COST = "{workers} workers, {what}: CPU µs a job"
BURST = f"burst of {CLIENTS} on {BURST_WORKERS} workers: {{figure}} ms"

GOALS = [
    *(
        Goal(f"shoal, {RATE.format(workers=n, what=WITH)}", at_least=8 * 139)
        for n in JOBS
    ),
    *(
        Goal(f"shoal, {RATE.format(workers=n, what=WITHOUT)}", at_least=1.5 * 790)
        for n in JOBS
    ),
    Goal(f"shoal, {BURST.format(figure='p99')}", at_most=14_000),
    # For comparing days: the yardstick is the same on each.
    *(
        Goal(
            f"shoal, {COST.format(workers=n, what=what)}",
            f"yardstick, {COST.format(workers=n, what=what)}",
        )
        for n in JOBS
        for what in (WITH, WITHOUT)
    ),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        secrets = ["--api-key", "k", "--dispatch-open", "--log-level", "error"]
        patient = ["--queue-max", str(2 * max(JOBS.values())), "--queue-wait", "120"]
        yardstick = str(HERE / "yardstick_jobs.py")
        with program(*serve, *secrets, *patient) as shoal, program(yardstick) as bare:
            servers = [("shoal", shoal), ("yardstick", bare)]
            for _ in range(rounds):
                for workers in JOBS:
                    for what in (WITH, WITHOUT):
                        for name, server in servers:
                            row = {"workers": workers, "what": what}
                            signs, jobs = what == WITH, JOBS[workers]
                            rate, cost = run(commit_many(server, workers, jobs, signs))
                            results[f"{name}, {RATE.format(**row)}"].append(rate)
                            results[f"{name}, {COST.format(**row)}"].append(cost)
                for name, server in servers:
                    for figure, value in run(_burst(server)).items():
                        row = BURST.format(figure=figure)
                        results[f"{name}, {row}"].append(value * 1e3)
                servers.reverse()
    return results


async def commit_many(
    server: Program, workers: int, jobs: int, signs: bool
) -> tuple[float, float]:
    """Return jobs a second, and the server's CPU time for each in microseconds."""
    port = _port(server)
    async with at_work(port, workers, signs=signs), clients_of(port) as clients:
        before = await clients[0].logged()
        cpu, began = server.cpu(), time.perf_counter()
        todo = iter(range(jobs))
        await asyncio.gather(*(each.commit_all(todo) for each in clients))
        while await clients[0].logged() < before + jobs:  # noqa: ASYNC110  # afar
            await asyncio.sleep(POLL)
        seconds, used = time.perf_counter() - began, server.cpu() - cpu
    return jobs / seconds, used / jobs * 1e6


async def _burst(server: Program) -> dict[str, float]:
    port = _port(server)
    async with at_work(port, BURST_WORKERS, signs=True), clients_of(port) as clients:
        took = sorted(await asyncio.gather(*(each.one() for each in clients)))
    p99 = took[math.ceil(0.99 * len(took)) - 1]
    return {"p50": statistics.median(took), "p99": p99}


class Client:
    """A connection that is kept, with one request at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer

    async def commit_all(self, todo: Iterator[int]) -> None:
        for _ in todo:
            await self._commit()

    async def one(self) -> float:
        """Return how long it takes from a commit until there is the result."""
        began = time.perf_counter()
        job_id = await self._commit()
        job = await self._ask(f"GET /v1/jobs/{job_id}?wait=60")
        if job["status"] != "completed":
            raise RuntimeError(f"not done: {job}")
        return time.perf_counter() - began

    async def logged(self) -> int:
        size: int = (await self._ask("GET /v1/log"))["size"]
        return size

    async def _commit(self) -> str:
        job_id: str = (await self._ask("POST /v1/jobs/commit/cheap", BODY))["job_id"]
        return job_id

    async def _ask(self, what: str, body: bytes = b"") -> dict:
        head = (
            f"{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        _, _, length = answer.lower().partition(b"content-length: ")
        data = await self._reader.readexactly(int(length.split(b"\r\n")[0]))
        if not answer.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(f"{what}: {answer!r} {data!r}")
        return json.loads(data)


@asynccontextmanager
async def at_work(port: int, count: int, *, signs: bool) -> AsyncIterator[None]:
    """Have workers there for the length of the block."""
    async with asyncio.TaskGroup() as tasks:
        providers = [Provider(number, signs=signs) for number in range(1, count + 1)]
        working = [
            tasks.create_task(each.work(*await each.join(port))) for each in providers
        ]
        yield
        for each in working:
            each.cancel()
    await asyncio.sleep(0.1)  # for the server to know that they have gone


@asynccontextmanager
async def clients_of(port: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(CLIENTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            clients.append(Client(reader, writer))
        yield clients


def _port(server: Program) -> int:
    port: int = server.report.get("port") or server.report["ports"]["http"]
    return port
