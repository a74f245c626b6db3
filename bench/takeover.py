"""From the kill of a hub to the first job that the next one gives out, or again to the
worker that still runs it.

A coordinator with one front, 100 workers and 10,000 background responses, each of which
takes a worker 8 s.  Its hub is killed again and again, each time once there is a
standby and the workers have been connected for a while, as they otherwise wait longer
before they connect again.
"""

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict

from aiohttp import ClientSession

from load import run
from processes import HERE, Program, program
from report import Goal, Results
from scaleout import hub_of, standby_of

ROUNDS = 5
WORKERS = 100
JOBS = 10_000
SECONDS = 8.0  # of a job
SUBMITTING_AT_ONCE = 32
SETTLE = 13.0  # seconds between a takeover and the next kill

LEASED = f"kill of the hub with {WORKERS} workers: s to the first job given out"
GOALS = [Goal(LEASED, at_most=2)]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        secrets = ["--api-key", "k", "--join-token", "t", "--log-level", "error"]
        patient = ["--queue-max", str(2 * JOBS), "--queue-wait", "6000"]
        with program(*serve, *secrets, *patient, "--fronts", "1") as coordinator:
            port = coordinator.report["ports"]["http"]
            workers = [str(HERE / "shoal_node.py"), str(port), str(WORKERS)]
            with program(*workers, str(SECONDS)) as nodes:
                begun = _Begun(nodes)
                run(_submit(port))
                for _ in range(rounds):
                    results[LEASED].append(_takeover(coordinator, begun))
    return results


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
