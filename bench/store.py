"""The store with a million ended jobs of 10,000 owners, beside an empty one.

Each job is a chat of 1.6 KB on average, with its answer, receipt and payment, written
as the hub writes it, 100 jobs a commit.  The texts are pieces of this project's
documents: a text that is repeated could be compressed to nothing.  *page*: the slowest
of 50 pages of each list, of 100 entries.  *usage*: the same of 1,000 sums of all days,
by key and model, key and node, and all three, after the prune that adds the days up.
*commit*: a whole job, one after the other; the p99 of 2,500.
*prune*: as the hourly prune of a tenth of the jobs, the p99 of commits meanwhile.
*CPU*: of all threads for a page, of the list that takes most; of the thread that writes
for a commit, the median of five times 500.
*ready*: `shoal serve` on the database until it answers.  *chat*: over HTTP there, one
after the other, from a node that answers at once; *served commit*: the mean of the
coordinator's own commits meanwhile.  *beside readers*: while ten keys read everybody's
lists over HTTP as fast as they may (tests/attacks/flooding.py), five times three
seconds in turn with as long alone.  SHOAL_BENCH_JOBS sets another number of jobs.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import sqlite3
import statistics
import struct
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import count, cycle
from pathlib import Path
from typing import TypeVar

from engine import TEXT as PIECE
from hostile import KEY, TOKEN, flood
from load import request, run
from node import BINARY, TEXT, frame, receive, upgrade
from processes import program
from report import Goal, Results
from shoal.domain.facts import Fact, JobCompleted, JobLeased, JobStarted, JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.money import Micros
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import Chat
from shoal.ledger.accounts import Transfer
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier
from shoal.ledger.notary import Notary
from shoal.ledger.receipts import Claims
from shoal.pool.lifecycle import JobState
from shoal.store.ledger import (
    JobPlace,
    LedgerEntries,
    LoggedReceipt,
    LogHead,
    UsageField,
)
from shoal.store.port import JobFilter
from shoal.store.sqlite.database import SqliteStore

T = TypeVar("T")

ROUNDS = 1  # it fills a database of several GB
JOBS = int(os.environ.get("SHOAL_BENCH_JOBS", "1000000"))
OWNERS = 10_000
IN_A_COMMIT = 100
COMMITS = 500
TIMES = 5  # alone and beside readers in turn: the same commits differ by a third
WINDOW = 3.0  # seconds
PAGES = 50
ENTRIES = 100
SUMS = 1000

PAGE = "page: slowest, ms"
PAGE_CPU = "page: CPU ms"
USAGE = "usage: slowest, ms"
USAGE_CPU = "usage: CPU ms"
ALONE = "commit: p99, ms"
ALONE_CPU = "commit: CPU µs"
PRUNING = "commit beside prune: p99, ms"
LONGEST = "commit beside prune: longest, ms"
SIZE = "size: KB a job"
LOG = "log: MB after prune"
READY = "ready: s"
BESIDE = " beside readers"
CHAT, CHAT_MEDIAN = "chat{}: p99, ms", "chat{}: median, ms"
SERVED = "served commit{}: ms"
COMMITS_SPENT = "shoal_store_commit_seconds_sum "
COMMITS_MADE = "shoal_store_commit_seconds_count "
FULL, EMPTY = "filled, ", "empty, "

GOALS = [
    Goal(FULL + PAGE, at_most=20),
    Goal(FULL + PAGE_CPU, at_most=20),
    Goal(FULL + USAGE, at_most=20),
    Goal(FULL + USAGE_CPU, at_most=20),
    Goal(FULL + ALONE, EMPTY + ALONE),
    *(
        Goal(name + row.format(BESIDE), name + row.format(""), at_most=2)
        for name in (EMPTY, FULL)
        for row in (CHAT_MEDIAN, CHAT, SERVED)
    ),
    Goal(FULL + ALONE_CPU, EMPTY + ALONE_CPU),
    Goal(FULL + PRUNING, FULL + ALONE),
    Goal(FULL + SIZE, at_most=3),
    Goal(FULL + READY, at_most=1),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        for name, jobs in ((EMPTY, 0), (FULL, JOBS)):
            with tempfile.TemporaryDirectory() as folder:
                found = run(_measure(Path(folder), jobs)) | _served(folder)
                for row, value in found.items():
                    results[name + row].append(value)
    return results


async def _measure(folder: Path, jobs: int) -> dict[str, float]:
    path = folder / "shoal.db"
    history = History(SqliteStore(path))
    await history.store.open()
    for _ in range(0, jobs, IN_A_COMMIT):
        await history.add(IN_A_COMMIT)
    found = {}
    if jobs:
        found[SIZE] = await history.store.database.read(_size) / jobs / 1e3
    found[PAGE] = 1e3 * max([await _slowest(each) for each in history.lists()])
    found[PAGE_CPU] = 1e3 * max([await _cpu(each) for each in history.lists()])
    waits: list[float] = []
    costs = []
    for _ in range(TIMES):
        waits += await history.commits(COMMITS)
        costs.append(history.cpu / COMMITS * 1e6)
    found |= {ALONE: _p99(waits), ALONE_CPU: statistics.median(costs)}
    pruning = asyncio.create_task(history.store.prune(jobs / 10))
    took = await history.commits(1)
    while not pruning.done():
        took += await history.commits(1)
    await pruning
    found[PRUNING], found[LONGEST] = _p99(took), max(took) * 1e3
    found[USAGE] = 1e3 * max([await _slowest(each) for each in history.usage()])
    found[USAGE_CPU] = 1e3 * max([await _cpu(each) for each in history.usage()])
    found[LOG] = path.with_name("shoal.db-wal").stat().st_size / 1e6
    await history.store.close()
    return found


class History:
    """Writes jobs from their beginning to their end, a second after the other."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self._signer = Signer.from_seed(b"s" * 32)
        self._notary = Notary(self._signer, Frontier(), 0, EMPTY_ROOT)
        self._numbers = count()
        self.cpu = 0.0  # seconds of the thread that writes, for the last commits
        transact = store.database.transact

        async def measured(work: Callable[[sqlite3.Connection], T]) -> T:
            def run(sql: sqlite3.Connection) -> T:
                began = time.thread_time()
                try:
                    return work(sql)
                finally:
                    self.cpu += time.thread_time() - began

            return await transact(run)

        store.database.transact = measured  # type: ignore[method-assign]  # to measure

    async def commits(self, number: int) -> list[float]:
        """Write jobs one after the other; return the seconds that each took."""
        took = []
        self.cpu = 0.0
        for _ in range(number):
            began = time.perf_counter()
            await self.add(1)
            took.append(time.perf_counter() - began)
        return took

    async def add(self, number: int) -> None:
        facts: list[Fact] = []
        claims: list[Claims] = []
        transfers, at = [], 0.0
        for each in (next(self._numbers) for _ in range(number)):
            at, job_id, owner = float(each), _id(each), f"o{each % OWNERS}"
            facts += _story(job_id, owner, each)
            claims.append(_claims(job_id))
            transfers.append(
                Transfer(f"user:{owner}", "worker:w", Micros(10), "paid", job_id)
            )
        sealed = self._notary.seal(claims, at)
        receipts = [
            LoggedReceipt(each.index, claim, each.body, each.signature, at)
            for claim, each in zip(claims, sealed.receipts, strict=True)
        ]
        newest = sealed.checkpoint
        head = LogHead(newest.size, newest.root, sealed.note, at)
        places = {each.job_id: JobPlace("grandsage:beagle", 10) for each in claims}
        entries = LedgerEntries(transfers, receipts, sealed.nodes, head, places=places)
        await self.store.append(facts, at, (), entries)
        self._notary.commit(sealed)

    def lists(self) -> list[Callable[[], Awaitable[object]]]:
        """Return what reads a page of each list."""
        store, ledger = self.store, self.store.ledger
        filters = [
            JobFilter(),
            JobFilter("o7"),
            JobFilter("o7", user="u7"),
            JobFilter(states=frozenset({JobState.FAILED})),
            JobFilter("o7", frozenset({JobState.FAILED})),
        ]
        return [
            *(lambda wanted=each: store.recent(wanted, ENTRIES) for each in filters),
            lambda: ledger.recent_receipts(None, ENTRIES),
            lambda: ledger.recent_receipts("o7", ENTRIES),
            lambda: ledger.transfers("user:o7", ENTRIES),
            lambda: ledger.transfers("worker:w", ENTRIES),
            lambda: store.keys.usage_of("o7", 0),
        ]

    def usage(self) -> list[Callable[[], Awaitable[object]]]:
        """Return what reads a page of usage, of all days together."""
        groups: list[tuple[UsageField, ...]] = [("key", "model"), ("key", "node")]
        groups.append(("key", "model", "node"))
        usage = self.store.usage
        return [partial(usage.sums, 0, 99, by, SUMS) for by in groups]


def _id(number: int) -> JobId:
    """Return an id as the coordinator's: 24 hexadecimal digits in no order."""
    return JobId(hashlib.sha256(b"%d" % number).hexdigest()[:24])


def _story(job_id: JobId, owner: str, number: int) -> list[Fact]:
    pieces = random.Random(number)
    chat = Chat("qwen3:8b", ({"role": "user", "content": _piece(pieces, 1600)},))
    one = LeaseNumber(1)
    outcome = Outcome(_piece(pieces, 400), "stop", Usage(400, 100))
    return [
        JobSubmitted(Job(job_id, chat, owner=owner)),
        JobLeased(job_id, WorkerId("grandsage:beagle"), one, "least busy"),
        JobStarted(job_id, one),
        JobCompleted(job_id, one, outcome, output_hash=f"{number:064x}"),
    ]


@cache
def _prose() -> str:
    folder = Path(__file__).parent.parent / "docs"
    return "".join(path.read_text("utf-8") for path in sorted(folder.rglob("*.md")))


def _piece(pieces: random.Random, size: int) -> str:
    """Return text of half to one and a half of a size."""
    prose = _prose()
    length = pieces.randrange(size // 2, size + size // 2)
    start = pieces.randrange(len(prose) - length)
    return prose[start : start + length]


def _claims(job_id: JobId) -> Claims:
    return Claims(
        job_id=job_id,
        worker="grandsage:beagle",
        worker_key=None,
        output_hash=f"sha256:{hashlib.sha256(job_id.encode()).hexdigest()}",
        prompt_tokens=400,
        completion_tokens=100,
        price=10,
        fee=0,
        payment_ref=None,
        at="2026-02-09T12:00:05.000Z",
        verdict=Verdict.UNSIGNED,
        worker_receipt=None,
    )


async def _slowest(read: Callable[[], Awaitable[object]]) -> float:
    took = []
    for _ in range(PAGES):
        began = time.perf_counter()
        await read()
        took.append(time.perf_counter() - began)
    return max(took)


def _size(sql: sqlite3.Connection) -> int:
    ((pages,),) = sql.execute("PRAGMA page_count")
    ((size,),) = sql.execute("PRAGMA page_size")
    return int(pages) * int(size)


async def _cpu(read: Callable[[], Awaitable[object]]) -> float:
    began = time.process_time()
    for _ in range(PAGES):
        await read()
    return (time.process_time() - began) / PAGES


def _p99(took: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1e3 * sorted(took)[math.ceil(0.99 * len(took)) - 1]


def _served(folder: str) -> dict[str, float]:
    """Measure a coordinator on the database, alone and beside readers of lists."""
    found: dict[str, float] = {}
    took: dict[str, list[float]] = defaultdict(list)
    commits: dict[str, list[float]] = defaultdict(list)
    began = time.perf_counter()
    with program(
        *("-m", "shoal", "serve", "--port", "0", "--data-dir", folder),
        *("--api-key", KEY, "--join-token", TOKEN),
        *("--json", "--log-level", "warning"),
    ) as coordinator:
        found[READY] = time.perf_counter() - began
        url, port = coordinator.report["url"], coordinator.report["ports"]["http"]
        for beside in cycle(("", BESIDE)):
            reading = flood("lists", url) if beside else nullcontext()
            with reading:
                spent, made = _commits(url)
                took[beside] += run(_chats(port))
                later, more = _commits(url)
            commits[beside].append(1e3 * (later - spent) / (more - made))
            if len(commits[BESIDE]) == TIMES:
                break
    for beside, each in took.items():
        found[CHAT_MEDIAN.format(beside)] = 1e3 * statistics.median(each)
        found[CHAT.format(beside)] = _p99(each)
        found[SERVED.format(beside)] = statistics.median(commits[beside])
    return found


def _commits(url: str) -> tuple[float, float]:
    """Return the seconds of all commits of a coordinator, and their number."""
    asked = urllib.request.Request(
        url + "/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    spent, made = (
        float(line.removeprefix(name))
        for name in (COMMITS_SPENT, COMMITS_MADE)
        for line in lines
        if line.startswith(name)
    )
    return spent, made


async def _chats(port: int) -> list[float]:
    """Return the seconds of each chat of a window, one after the other."""
    asked = request("a question", key=KEY, stream=True)
    took: list[float] = []
    node = await upgrade(port, f"/ws?token={TOKEN}&model=m&max_concurrency=1&name=n")
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(_answer(*node))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        until = time.perf_counter() + WINDOW
        while (began := time.perf_counter()) < until:
            writer.write(asked)
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            took.append(time.perf_counter() - began)
        writer.close()
        answering.cancel()
    node[1].close()
    return took


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a node, at once."""
    while True:
        opcode, payload = await receive(reader)
        task = json.loads(payload) if opcode == TEXT and payload else {}
        if "id" in task and "stop" not in task:
            number = struct.pack("!I", task["id"])
            writer.write(frame(BINARY, number + PIECE.encode()))
            writer.write(frame(BINARY, number))
