"""Chats with fronts, jobs on PostgreSQL, and how long streams stall without a hub.

*Chats*: 64 streams at once, each of 64 chunks in a burst or 25 a second, through one
worker before bench/engine.py, without fronts, with one and with two in turn.  *hub* is
the process that has the pool, *all* the coordinator's processes together; the worker's
CPU time is in neither.  *Jobs*: as in bench/jobs.py, with receipts, on SQLite and on
PostgreSQL in turn; its server runs on this machine, and its CPU time is told apart.
*Takeover*: 10 paced streams are open, through one front, when the hub is killed; the
seconds until each has its next text, and the CPU time of the next hub until all are
whole, its time as a standby included.  The standby's memory is what would be free
without it (proportional set size).
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import psutil

from engine import CHUNKS, TEXT
from jobs import commit_many
from load import PATIENCE, READ_MAX, ask_all, connected, request, run
from peers import KEY, Gateway, shoal
from processes import HERE, Program, cpu_of, cpu_of_all, program
from report import Goal, Results
from shoal.app.parts import HUB_NAME, STANDBY_NAME

sys.path.insert(0, str(HERE.parent / "tests"))
sys.path.insert(0, str(HERE.parent / "scripts"))

from harness.postgres import PostgresServer, postgres_server

ROUNDS = 5
STREAMS = 64  # at once
ANSWERS = {"burst": 256, "paced": 64}  # of a round
JOBS = {1: 200, 32: 1000}  # of a round, by workers
FRONTS = {0: "without fronts", 1: "with 1 front", 2: "with 2 fronts"}
TAKEN_OVER = 10  # streams

CHAT = "{part} {fronts}, {pace}, {streams} streams: CPU µs a chat"
JOB = "{store}, {workers}: CPU µs a job"
SERVER = "PostgreSQL's server"
STALLED = "takeover, {which} of {streams} streams: s to the next text"
STARTED = "takeover, the next hub: CPU s"
STANDBY = "takeover, the standby: MB"


def _chat(part: str, fronts: int, pace: str) -> str:
    return CHAT.format(part=part, fronts=FRONTS[fronts], pace=pace, streams=STREAMS)


def _job(store: str, workers: int) -> str:
    count = "1 worker" if workers == 1 else f"{workers} workers"
    return JOB.format(store=store, workers=count)


def _stalled(which: str) -> str:
    return STALLED.format(which=which, streams=TAKEN_OVER)


GOALS = [
    *(
        Goal(_chat(part, fronts, pace), _chat("hub", 0, pace), at_most=at_most)
        for part, limits in (
            ("hub", {"burst": 0.7, "paced": 0.6}),
            ("all", {"burst": 1.4, "paced": 1.4}),
        )
        for pace, at_most in limits.items()
        for fronts in (1, 2)
    ),
    *(Goal(_job("PostgreSQL", n), _job("SQLite", n), at_most=2) for n in JOBS),
    *(Goal(_job(SERVER, n), _job("SQLite", n)) for n in JOBS),
    Goal(_stalled("last"), at_most=2),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with program(str(HERE / "engine.py")) as engine, ExitStack() as stack:
        port = int(engine.report["port"])
        pools = {
            count: stack.enter_context(shoal(port, "--fronts", str(count)))
            for count in FRONTS
        }
        for count in (1, 2):
            standby_of(pools[count].program)  # its start is no part of a chat
        _chats(pools, defaultdict(list))  # for all to be warm
        for _ in range(rounds):
            _chats(pools, results)
            pools = dict(reversed(pools.items()))
    with postgres_server() as server, ExitStack() as stack:
        coordinators = {
            "SQLite": stack.enter_context(_dispatching()),
            "PostgreSQL": stack.enter_context(_dispatching("--store", server.url())),
        }
        _jobs(coordinators, server, defaultdict(list))
        for _ in range(rounds):
            _jobs(coordinators, server, results)
            coordinators = dict(reversed(coordinators.items()))
    with program(str(HERE / "engine.py")) as engine:
        port = int(engine.report["port"])
        for number in range(rounds):
            with shoal(port, "--fronts", "1") as pool:
                _takeover(pool, number, results)
    return results


def _chats(pools: Mapping[int, Gateway], out: Results) -> None:
    for pace, answers in ANSWERS.items():
        asked = request(pace, key=KEY, stream=True)
        for fronts, pool in pools.items():
            hub = hub_of(pool.program)
            before, all_before = cpu_of(hub), pool.program.cpu()
            run(ask_all(pool.port, asked, STREAMS, answers))
            used, all_used = cpu_of(hub) - before, pool.program.cpu() - all_before
            out[_chat("hub", fronts, pace)].append(used / answers * 1e6)
            if fronts:
                out[_chat("all", fronts, pace)].append(all_used / answers * 1e6)


@contextmanager
def _dispatching(*options: str) -> Iterator[Program]:
    """Run a coordinator for workers of Dispatch within the block."""
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        secrets = ["--api-key", "k", "--dispatch-open", "--log-level", "error"]
        patient = ["--queue-max", str(2 * max(JOBS.values())), "--queue-wait", "600"]
        with program(*serve, *secrets, *patient, *options) as running:
            yield running


def _jobs(
    coordinators: Mapping[str, Program], server: PostgresServer, out: Results
) -> None:
    for workers, jobs in JOBS.items():
        for store, coordinator in coordinators.items():
            before = cpu_of_all(server.pid)
            _, cost = run(commit_many(coordinator, workers, jobs, signs=True))
            used = cpu_of_all(server.pid) - before
            out[_job(store, workers)].append(cost)
            if store == "PostgreSQL":
                out[_job(SERVER, workers)].append(used / jobs * 1e6)


def _takeover(pool: Gateway, number: int, out: Results) -> None:
    """Kill the hub under open streams."""
    out[STANDBY].append(standby_of(pool.program).memory_full_info().pss / 1e6)
    run(ask_all(pool.port, request("burst", key=KEY, stream=True), 1, 1))
    asked = [
        # Another worker repeats an answer only if its engine would say the same.
        request(f"again {number} {each}", key=KEY, stream=True, temperature=0)
        for each in range(TAKEN_OVER)
    ]
    stalls = run(_stalls(pool, asked))
    out[_stalled("median")].append(statistics.median(stalls))
    out[_stalled("last")].append(max(stalls))
    out[STARTED].append(cpu_of(hub_of(pool.program)))


async def _stalls(pool: Gateway, asked: Sequence[bytes]) -> list[float]:
    """Kill the hub once all streams have begun; return how long each stalled."""
    hub = hub_of(pool.program)
    begun = asyncio.Barrier(len(asked) + 1)
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(_arrivals(pool.port, each, begun)) for each in asked
        ]
        await begun.wait()
        killed = time.perf_counter()
        os.kill(hub, signal.SIGKILL)
    return [_end_of_stall(stream.result(), killed) for stream in streams]


async def _arrivals(port: int, asked: bytes, begun: asyncio.Barrier) -> list[float]:
    """Return when texts of an answer came.  Raises RuntimeError if it is not whole."""
    async with connected(port) as client:
        answer = await client.begin(asked)
        await begun.wait()
        arrived = [time.perf_counter()]
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            data = await client.reader.read(READ_MAX)
            if not data:
                raise RuntimeError(f"the stream broke after {answer[-400:]!r}")
            answer += data
            if TEXT.encode() in data:
                arrived.append(time.perf_counter())
    if answer.count(TEXT.encode()) != CHUNKS:
        raise RuntimeError(f"not the whole answer: {answer[-400:]!r}")
    return arrived


def _end_of_stall(arrived: Sequence[float], killed: float) -> float:
    """Return the seconds from the kill to the end of the longest gap after it.

    What the hub had sent before may still arrive after the kill.
    """
    gaps = [(b - a, b) for a, b in pairwise(arrived) if b > killed]
    return max(gaps)[1] - killed


def hub_of(running: Program) -> int:
    """Return the process that has the pool: without fronts, the only one."""
    hub = _child(running, HUB_NAME)
    return running.process.pid if hub is None else hub.pid


def standby_of(running: Program) -> psutil.Process:
    """Wait for the process that is to be the next hub."""
    deadline = time.monotonic() + PATIENCE
    while (standby := _child(running, STANDBY_NAME)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("there is no standby")
        time.sleep(0.1)
    return standby


def _child(running: Program, name: str) -> psutil.Process | None:
    children = psutil.Process(running.process.pid).children()
    return next((each for each in children if each.name() == name), None)
