"""What a page that watches the pool costs a coordinator, in CPU time.

*page*: what one client of `GET /admin/live` adds to a coordinator that does nothing
else, without workers and with 1,000 idle ones that send a message every 10 s: the CPU
time with the client less that without it, as a share of a core.  *look*: CPU of the
loop's thread for one look at 1,000 workers, all busy, and 10,000 open jobs while
nothing changes, in a coordinator in this process; *first look* describes all of them.
*snapshot*: its size.
"""

import asyncio
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from unittest.mock import patch

from aiohttp import ClientSession

from load import run
from processes import HERE, Program, program
from report import Goal, Results
from shoal.app.server import RunningCoordinator, run_coordinator
from shoal.config import ServeConfig
from shoal.domain.ids import JobId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.work import Chat
from shoal.gateway.operators.pool_view import PoolView

ROUNDS = 3
KEY = "sk-bench-9f2c71d4e8a6b03597c1d5e2"
WORKERS = 1000
JOBS = 10_000
WINDOW = 15.0  # seconds with a page, and as many without
SETTLE = 3.0  # seconds after the last worker has joined
LOOKS = 10

IDLE = "page, no workers: % of a core"
WATCHED = f"page, {WORKERS} idle workers: % of a core"
LOOK = f"look at {WORKERS} workers and {JOBS} jobs: ms"
FIRST = f"first look at {WORKERS} workers and {JOBS} jobs: ms"
SNAPSHOT = f"snapshot of {WORKERS} workers: KB"

GOALS = [
    Goal(IDLE, at_most=1),
    Goal(WATCHED, at_most=1),
    Goal(LOOK),
    Goal(FIRST),
    Goal(SNAPSHOT),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        for row, workers in ((IDLE, 0), (WATCHED, WORKERS)):
            results[row].append(_share_of_page(workers))
        for row, value in run(_looks()).items():
            results[row].append(value)
    return results


def _share_of_page(workers: int) -> float:
    """Return what a page adds, in percent of a core."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = ["--port", "0", "--data-dir", folder, "--api-key", KEY]
        quiet = ["--log-level", "error", "--json", "--no-discovery"]
        coordinator = stack.enter_context(
            program("-m", "shoal", "serve", "--join-token", "t", *where, *quiet)
        )
        port = coordinator.report["ports"]["http"]
        if workers:
            nodes = [str(HERE / "node.py"), str(port), str(workers)]
            stack.enter_context(program(*nodes))
        time.sleep(SETTLE)
        without = _cpu_of_window(coordinator)
        with _page(port):
            time.sleep(1)  # without the first snapshot
            watched = _cpu_of_window(coordinator)
        return (watched - without) * 100


def _cpu_of_window(coordinator: Program) -> float:
    """Return the share of a core that a coordinator uses for a while."""
    cpu, began = coordinator.cpu(), time.perf_counter()
    time.sleep(WINDOW)
    return (coordinator.cpu() - cpu) / (time.perf_counter() - began)


@contextmanager
def _page(port: int) -> Iterator[None]:
    """Listen within the block."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/admin/live",
        headers={"Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request) as response:

        def read() -> None:
            with suppress(OSError, HTTPException):  # it is closed below
                while response.read1(1 << 16):
                    pass

        Thread(target=read, daemon=True).start()
        yield
        response.fp.raw._sock.shutdown(2)


async def _looks() -> dict[str, float]:
    """Return the CPU time of looks at many workers and jobs, and what they give."""
    config = ServeConfig(
        port=0, api_key=KEY, join_token="t", queue_max=2 * JOBS, no_discovery=True
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stored = replace(config, data_dir=Path(folder))
        async with run_coordinator(stored) as running:
            nodes = [str(HERE / "node.py"), str(running.port), str(WORKERS)]
            await asyncio.to_thread(stack.enter_context, program(*nodes))
            limits = TimeLimits(queue=3600.0, first_output=3600.0)
            question = ({"role": "user", "content": "hi"},)
            for number in range(JOBS):
                job = Job(JobId(f"j{number}"), Chat("m", question), limits)
                running.hub.submit(job, Unheard())
            while len(running.hub.pool.jobs) < JOBS:  # noqa: ASYNC110  # no event for it
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE)
            found = await _watched(running)
            running.hub.cancel_all_of("", "enough")
        return found


async def _watched(running: RunningCoordinator) -> dict[str, float]:
    took: list[float] = []
    look = PoolView.look

    def measured(view: PoolView) -> object:
        began = time.thread_time()
        try:
            return look(view)
        finally:
            took.append((time.thread_time() - began) * 1e3)

    headers = {"Authorization": f"Bearer {KEY}"}
    with patch.object(PoolView, "look", measured):
        async with (
            ClientSession(headers=headers, read_bufsize=1 << 24) as session,
            session.get(f"{running.url}/admin/live") as response,
        ):
            snapshot = await response.content.readuntil(b"\n\nevent: snapshot\n")
            snapshot = await response.content.readuntil(b"\n\n")
            while len(took) <= LOOKS:  # noqa: ASYNC110  # no event for it
                await asyncio.sleep(0.2)
    return {
        LOOK: statistics.median(took[1:]),
        FIRST: took[0],
        SNAPSHOT: len(snapshot) / 1e3,
    }


class Unheard:
    """Takes the events of a job."""

    def on_accepted(self, job_id: JobId) -> None:
        pass

    def on_leased(self, *event: object) -> None:
        pass

    def on_progress(self, *event: object) -> None:
        pass

    def on_results(self, *event: object) -> None:
        pass

    def on_end(self, job: object) -> None:
        pass
