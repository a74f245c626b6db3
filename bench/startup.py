"""Seconds until `shoal --help` has answered, and until `shoal serve` is ready.

*waiting*: on a database with 10,000 jobs of as many owners that wait for 1,000 models.
Every second of them had a worker when the coordinator stopped.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import program
from report import Goal, Results
from shoal.domain.facts import Fact, JobLeased, JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.work import Chat
from shoal.store.sqlite.database import SqliteStore

ROUNDS = 7
OWNERS = 10_000
MODELS = 1_000

HELP = "shoal --help: s"
READY = "shoal serve until ready: s"
READY_CPU = "shoal serve until ready: CPU s"
WAITING = "shoal serve until ready, waiting: s"
WAITING_CPU = "shoal serve until ready, waiting: CPU s"
GOALS = [Goal(HELP, at_most=0.15), Goal(READY, at_most=1), Goal(WAITING, at_most=1)]


def measure(rounds: int) -> Results:
    results: Results = {
        row: [] for row in (HELP, READY, READY_CPU, WAITING, WAITING_CPU)
    }
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder, "filled")
        filled.mkdir(mode=0o700)
        asyncio.run(_fill(filled))
        for number in range(rounds):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "shoal", "--help"],
                check=True,
                capture_output=True,
            )
            results[HELP].append(time.perf_counter() - began)
            empty, copy = Path(folder, f"empty{number}"), Path(folder, f"copy{number}")
            shutil.copytree(filled, copy)
            for data_dir, wall, cpu in (
                (empty, READY, READY_CPU),
                (copy, WAITING, WAITING_CPU),
            ):
                for row, value in zip((wall, cpu), _ready(data_dir), strict=True):
                    results[row].append(value)
    return results


def _ready(folder: Path) -> tuple[float, float]:
    """Return the seconds until it is ready, and those of CPU time."""
    began = time.perf_counter()
    with program(
        *("-m", "shoal", "serve", "--port", "0", "--data-dir", str(folder)),
        *("--json", "--log-level", "warning"),
    ) as serve:
        return time.perf_counter() - began, serve.cpu()


async def _fill(folder: Path) -> None:
    store = SqliteStore(folder / "shoal.db")
    await store.open()
    facts: list[Fact] = []
    for number in range(OWNERS):
        text = f"{number:08} the quick brown fox jumps over a lazy dog " * 30
        chat = Chat(f"m{number % MODELS}", ({"role": "user", "content": text[:1600]},))
        job_id = JobId(f"{number:032x}")
        owner = f"o{number}"
        facts.append(JobSubmitted(Job(job_id, chat, TimeLimits(queue=3600.0), owner)))
        if number % 2:
            facts.append(JobLeased(job_id, WorkerId("w"), LeaseNumber(1), "least busy"))
    await store.append(facts, time.time())
    await store.close()
