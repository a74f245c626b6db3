"""From the loss of what has the pool to the first job that the next one gives out, or
again to the worker that still runs it.

A coordinator with one front, 100 workers and 10,000 background responses, each of which
takes a worker 8 s.  Its hub is killed again and again, each time once there is a
standby and the workers have been connected for a while, as they otherwise wait longer
before they connect again.

The same with three nodes that share a PostgreSQL server: the hub of the one that has
the pool is killed or stopped (SIGSTOP), or the whole node is killed, and started again.
An answer of 50 words a second streams through another node meanwhile.
"""

import asyncio
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path

import psutil
import psycopg
from aiohttp import ClientSession

from load import run
from processes import HERE, Program, free_port, program
from report import Goal, Results
from scaleout import hub_of, postgres_server, standby_of

ROUNDS = 5
WORKERS = 100
JOBS = 10_000
SECONDS = 8.0  # of a job
SUBMITTING_AT_ONCE = 32
SETTLE = 13.0  # seconds between a takeover and the next kill

LEASED = f"kill of the hub with {WORKERS} workers: s to the first job given out"
NODES = 3
STREAM = ("60", "streamed", "0.02")  # seconds, model, and seconds a word
AFTER = 1.0  # seconds for which the stream is read after the first job
FAULTS = {"kill of the hub": 2, "kill of the whole node": 2, "SIGSTOP of the hub": 5}
"""What is done to the node that has the pool, with the seconds that are allowed."""


def _first_job(fault: str) -> str:
    return f"{NODES} nodes, {fault}: s to the first job given out"


def _gap(fault: str) -> str:
    return f"{NODES} nodes, {fault}: s of the longest gap of a stream at another node"


GOALS = [
    Goal(LEASED, at_most=2),
    *(
        Goal(row(fault), at_most=seconds)
        for fault, seconds in FAULTS.items()
        for row in (_first_job, _gap)
    ),
]
SECRETS = ("--api-key", "k", "--join-token", "t", "--log-level", "error")
PATIENT = ("--queue-max", str(2 * JOBS), "--queue-wait", "6000")


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        with program(*serve, *SECRETS, *PATIENT, "--fronts", "1") as coordinator:
            port = coordinator.report["ports"]["http"]
            workers = [str(HERE / "shoal_node.py"), str(port), str(WORKERS)]
            with program(*workers, str(SECONDS)) as nodes:
                begun = _Begun(nodes)
                run(_submit(port))
                for _ in range(rounds):
                    results[LEASED].append(_takeover(coordinator, begun))
    with ExitStack() as stack:
        nodes = _Nodes(stack)
        for _ in range(rounds):
            for fault in FAULTS:
                nodes.lose(fault, results)
    return results


class _Nodes:
    """Nodes that share a database, with workers; all of it ends with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._url = stack.enter_context(postgres_server()).url()
        self._running: dict[int, ExitStack] = {}
        self._programs: dict[int, Program] = {}
        stack.callback(self._stop)
        self._ports = {free_port(): free_port() for _ in range(NODES)}
        for entrance in self._ports:
            self._start(entrance)
        first, *_ = self._ports.values()
        ports = ",".join(map(str, self._ports.values()))
        node = str(HERE / "shoal_node.py")
        stack.enter_context(program(node, ports, "1", *STREAM))
        workers = program(node, ports, str(WORKERS), str(SECONDS))
        self._begun = _Begun(stack.enter_context(workers))
        run(_submit(first))

    def lose(self, fault: str, results: Results) -> None:
        """Do it to the node that has the pool, and measure until another has it."""
        time.sleep(SETTLE)
        active = self._active()
        node = self._programs[active]
        standby_of(node)
        hub = hub_of(node)
        other = next(each for each in self._ports if each != active)
        with _Stream(self._ports[other]) as stream:
            lost = time.monotonic()
            if fault == "SIGSTOP of the hub":
                os.kill(hub, signal.SIGSTOP)
            elif fault == "kill of the hub":
                os.kill(hub, signal.SIGKILL)
            else:
                _kill(psutil.Process(node.process.pid))
            first = self._begun.after(lost + 0.05)
            results[_first_job(fault)].append(first - lost)
            results[_gap(fault)].append(stream.longest_gap(lost, first + AFTER))
        if fault == "kill of the whole node":
            self._running[active].close()
            self._start(active)

    def _start(self, entrance: int) -> None:
        """Start a node that has this port for others, and wait until it serves."""
        folder = self._folder / str(entrance)
        serve = ["-m", "shoal", "serve", "--data-dir", str(folder), "--json"]
        serve += ["--port", str(self._ports[entrance]), "--fronts", "1"]
        serve += ["--store", self._url, "--node", f"127.0.0.1:{entrance}"]
        stack = self._running[entrance] = ExitStack()
        node = stack.enter_context(program(*serve, *SECRETS, *PATIENT))
        self._programs[entrance] = node

    def _active(self) -> int:
        with psycopg.connect(self._url) as connection:
            row = connection.execute("SELECT node FROM lease").fetchone()
        assert row is not None, "the table has one row"
        return int(row[0].rpartition(":")[2])

    def _stop(self) -> None:
        for each in self._running.values():
            each.close()


def _kill(first: psutil.Process) -> None:
    """End all processes of a node at once."""
    first.suspend()  # it starts no other
    for each in (*first.children(recursive=True), first):
        with suppress(psutil.NoSuchProcess):
            each.kill()


class _Stream:
    """An answer that streams through a node, read in a thread within the block."""

    def __init__(self, port: int) -> None:
        body = {
            "model": STREAM[1],
            "messages": [{"role": "user", "content": "?"}],
            "stream": True,
        }
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        self._connection = HTTPConnection("127.0.0.1", port)
        data = json.dumps(body)
        self._connection.request("POST", "/v1/chat/completions", data, headers)
        self._answer = self._connection.getresponse()
        self._changed = threading.Condition()
        self._times: list[float] = []
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "_Stream":
        self._thread.start()
        self.longest_gap(0.0, time.monotonic())  # until it has begun
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread's read
        self._thread.join()
        self._connection.close()

    def longest_gap(self, since: float, until: float) -> float:
        """Wait for a text after ``until``; return the longest gap after ``since``.

        Raises RuntimeError if the stream ends before.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or (self._times and self._times[-1] > until)
            )
            if self._ended:
                raise RuntimeError("the stream has ended")
            times = self._times
            gaps = [b - a for a, b in pairwise(times) if b > since]
            return max(gaps, default=0.0)

    def _read(self) -> None:
        with suppress(OSError, HTTPException):
            for line in self._answer:
                if b"word" in line:
                    with self._changed:
                        self._times.append(time.monotonic())
                        self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class _Begun:
    """Reads when workers have got jobs."""

    def __init__(self, nodes: Program) -> None:
        self._nodes = nodes
        self._changed = threading.Condition()
        self._latest = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._nodes.process.stdout is not None
        for line in self._nodes.process.stdout:
            with self._changed:
                self._latest = json.loads(line)["began"]
                self._changed.notify_all()

    def after(self, moment: float) -> float:
        """Wait for the first one that began after a moment; return when it did."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest > moment)
            return self._latest


async def _submit(port: int) -> None:
    places = asyncio.Semaphore(SUBMITTING_AT_ONCE)
    url = f"http://127.0.0.1:{port}/v1/responses"
    async with ClientSession(headers={"Authorization": "Bearer k"}) as session:

        async def submit(number: int) -> None:
            body = {"model": "m", "input": f"{number}", "background": True}
            async with places, session.post(url, json=body) as response:
                response.raise_for_status()
                await response.read()

        await asyncio.gather(*map(submit, range(JOBS)))


def _takeover(coordinator: Program, begun: _Begun) -> float:
    """Kill the hub; return the seconds until a worker has a job of the next one."""
    standby_of(coordinator)
    time.sleep(SETTLE)
    killed = time.monotonic()
    os.kill(hub_of(coordinator), signal.SIGKILL)
    # A job that the hub had just given out began at once.
    return begun.after(killed + 0.05) - killed
