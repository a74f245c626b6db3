"""Readers of every list beside jobs that are committed, and a prune beside both.

Counts work instead of seconds: the lists that end before a commit begins.  What a
commit costs beside readers is measured in ``bench/store.py``.
"""

import asyncio
import sqlite3
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count, cycle
from pathlib import Path
from typing import TypeVar

import pytest

from shoal.domain.facts import Fact, JobCompleted, JobLeased, JobStarted, JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.money import Micros
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Chat
from shoal.ledger.accounts import Transfer
from shoal.pool.lifecycle import JobState
from shoal.store.ledger import LedgerEntries
from shoal.store.port import JobFilter
from shoal.store.sqlite.database import SqliteStore

T = TypeVar("T")

STORED = 2000  # jobs before the attack
IN_A_COMMIT = 100
COMMITS = 100
READERS = 10
ENTRIES = 1000  # of a page
OLD = 1000.0  # seconds: what ended before it is pruned
WAITED_MAX = 4  # lists that end before a commit begins, in the median


class Writer:
    """Writes whole jobs, and counts the lists that each commit waits for."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.lists = 0  # read so far
        self.waited: list[int] = []  # lists that ended before each commit began
        self._numbers = count()
        transact = store.database.transact

        async def counted(work: Callable[[sqlite3.Connection], T]) -> T:
            before = self.lists

            def run(sql: sqlite3.Connection) -> T:
                self.waited.append(self.lists - before)
                return work(sql)

            return await transact(run)

        store.database.transact = counted  # type: ignore[method-assign]  # to count

    async def write(self, number: int) -> None:
        """Write jobs in one commit."""
        facts: list[Fact] = []
        transfers = []
        for each in (next(self._numbers) for _ in range(number)):
            facts += _story(each)
            moved = Transfer(f"user:o{each % 50}", "worker:w", Micros(9), "paid", None)
            transfers.append(moved)
        await self.store.append(facts, float(each), (), LedgerEntries(transfers))

    @asynccontextmanager
    async def beside_readers(self) -> AsyncIterator[None]:
        """Read all lists within the block, ten at once."""
        stop = asyncio.Event()

        async def read_on(start: int) -> None:
            for each in cycle([*self._lists()[start:], *self._lists()[:start]]):
                if stop.is_set():
                    return
                await each()
                self.lists += 1

        async with asyncio.TaskGroup() as tasks:
            for start in range(READERS):
                tasks.create_task(read_on(start))
            yield
            stop.set()

    def _lists(self) -> list[Callable[[], Awaitable[object]]]:
        store, ledger = self.store, self.store.ledger
        failed = frozenset({JobState.FAILED})
        filters = [
            JobFilter(),
            JobFilter("o7"),
            JobFilter("o7", user="none"),
            JobFilter(states=failed),
            JobFilter("o7", failed),
        ]
        return [
            *(lambda wanted=each: store.recent(wanted, ENTRIES) for each in filters),
            lambda: ledger.recent_receipts(None, ENTRIES),
            lambda: ledger.recent_receipts("o7", ENTRIES),
            lambda: ledger.transfers("user:o7", ENTRIES),
            lambda: ledger.transfers("worker:w", ENTRIES),
            store.trusted_workers,
        ]


def _story(number: int) -> list[Fact]:
    job_id, one = JobId(f"j{number}"), LeaseNumber(1)
    chat = Chat("m", ({"role": "user", "content": f"question {number} " * 100},))
    return [
        JobSubmitted(Job(job_id, chat, owner=f"o{number % 50}")),
        JobLeased(job_id, WorkerId("w"), one, "least busy"),
        JobStarted(job_id, one),
        JobCompleted(job_id, one, Outcome("answer", "stop", Usage(1, 2))),
    ]


@pytest.mark.long
async def test_readers_of_every_list_do_not_delay_commits(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    writer = Writer(store)
    for _ in range(0, STORED, IN_A_COMMIT):
        await writer.write(IN_A_COMMIT)

    async with writer.beside_readers():
        writer.waited.clear()
        for _ in range(COMMITS):
            await writer.write(1)
        waited = [*writer.waited]
        pruning = asyncio.create_task(store.prune(OLD))
        commits = 0
        while not pruning.done():
            await writer.write(1)
            commits += 1
        pruned = await pruning

    assert writer.lists > COMMITS / 10  # they read meanwhile
    assert statistics.median(waited) <= WAITED_MAX
    assert pruned == OLD
    assert commits >= pruned / 100  # between its slices
    await store.close()
