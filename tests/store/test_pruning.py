"""Pruning beside other writes, and the size of the file afterwards."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from harness.databases import put_new_database
from shoal.domain.credentials import DAY, KeyUsage
from shoal.domain.facts import (
    Fact,
    JobCompleted,
    JobFailed,
    JobSubmitted,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Chat
from shoal.store.batches import (
    BATCH_ID_LENGTH,
    FilePurpose,
    StoredBatch,
    StoredFile,
    line_key,
)
from shoal.store.sql import pruning
from shoal.store.sql.pruning import FACTS_AT_ONCE, JOBS_AT_ONCE
from shoal.store.sqlite import database
from shoal.store.sqlite.database import SqliteStore, migrate

T = TypeVar("T")

JOBS = 10 * JOBS_AT_ONCE + 1
FACTS = FACTS_AT_ONCE + 1  # of workers
TEXT = random.Random(0).randbytes(5000).hex()  # hard to compress
INPUT = StoredFile("file-in", "al", "in.jsonl", FilePurpose.BATCH, 100, 1.0, None)
BATCH = StoredBatch(
    "batch_".ljust(BATCH_ID_LENGTH, "0"),
    *("al", "/v1/embeddings", INPUT.id, "24h", 1.0, 99.0),
)
CHAT = Chat("m", ({"role": "user", "content": TEXT},))


def story(name: str, owner: str = "al") -> list[Fact]:
    job_id = JobId(name)
    outcome = Outcome("done", "stop", Usage(3, 4))
    return [
        JobSubmitted(Job(job_id, CHAT, owner=owner)),
        JobCompleted(job_id, LeaseNumber(1), outcome),
    ]


async def filled(path: Path) -> SqliteStore:
    """Open a store with many jobs and facts that ended at 1.0."""
    put_new_database(path)
    store = SqliteStore(path)
    await store.open()
    stories = [fact for number in range(JOBS) for fact in story(f"j{number}")]
    await store.append(stories, 1.0)
    left = [WorkerLeft(WorkerId("w"), "reset")] * FACTS
    await store.append(left, 1.0)
    return store


async def value(store: SqliteStore, query: str) -> int:
    ((found,),) = await store.database.read(lambda sql: sql.execute(query).fetchall())
    return int(found)


async def test_other_writes_run_between_the_parts_of_a_prune(tmp_path: Path) -> None:
    store = await filled(tmp_path / "shoal.db")

    pruned = asyncio.create_task(store.prune(2.0))
    await asyncio.sleep(0)
    await store.append(story("new"), 3.0)
    assert not pruned.done()
    assert await value(store, "SELECT count(*) FROM jobs") > JOBS_AT_ONCE

    assert await pruned == JOBS
    assert await value(store, "SELECT count(*) FROM jobs") == 1
    assert await value(store, "SELECT count(*) FROM facts") == 0
    await store.close()


async def test_jobs_of_an_open_batch_are_examined_once(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    await store.files.add(INPUT, 1000)
    await store.batches.add(BATCH, 1000)
    work = Chat("m", ({"role": "user", "content": "hi"},))
    for at, key in ((1.0, BATCH.id), (2.0, "no batch")):
        facts: list[Fact] = []
        for number in range(2 * JOBS_AT_ONCE + 1):
            job_id, name = JobId(f"{at}-{number}"), line_key(key, number)
            job = Job(job_id, work, owner="al", idempotency_key=name)
            facts += [JobSubmitted(job), JobFailed(job_id, "no")]
        await store.append(facts, at)
    examined = []

    def substr(text: str, start: int, length: int) -> str:
        examined.append(text)
        return text[start - 1 : start - 1 + length]

    await store.database.transact(lambda sql: sql.create_function("substr", 3, substr))
    assert await store.prune(3.0) == 2 * JOBS_AT_ONCE + 1

    assert len(examined) == len(set(examined)) == 2 * (2 * JOBS_AT_ONCE + 1)
    assert await value(store, "SELECT count(*) FROM jobs") == 2 * JOBS_AT_ONCE + 1
    await store.close()


async def test_file_shrinks_after_a_prune(tmp_path: Path) -> None:
    store = await filled(tmp_path / "shoal.db")
    pages = await value(store, "PRAGMA page_count")

    await store.prune(2.0)

    left = await value(store, "PRAGMA page_count")
    assert left < pages / 4
    assert await value(store, "PRAGMA freelist_count") <= left * database.FREE_SHARE
    await store.close()
    with closing(sqlite3.connect(tmp_path / "shoal.db")) as sql:
        assert sql.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_free_pages_are_given_back_many_at_once(tmp_path: Path) -> None:
    store = await filled(tmp_path / "shoal.db")
    pages = await value(store, "PRAGMA page_count")
    transact, transactions = store.database.transact, 0

    async def counted(work: Callable[[sqlite3.Connection], T]) -> T:
        nonlocal transactions
        transactions += 1
        return await transact(work)

    store.database.transact = counted  # type: ignore[method-assign]  # to count
    await store.prune(2.0)

    freed = pages - await value(store, "PRAGMA page_count")
    assert freed > 2 * database.PAGES_AT_ONCE
    deleting = JOBS // JOBS_AT_ONCE + FACTS // FACTS_AT_ONCE
    assert transactions <= freed // database.PAGES_AT_ONCE + deleting + 10
    await store.close()


async def test_file_that_cannot_shrink_is_pruned(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shoal.db", isolation_level=None)) as sql:
        migrate(sql)  # without PRAGMA auto_vacuum, as before
    store = await filled(tmp_path / "shoal.db")
    pages = await value(store, "PRAGMA page_count")

    assert await store.prune(2.0) == JOBS

    assert await value(store, "PRAGMA page_count") == pages
    await store.append(story("new"), 3.0)
    assert await value(store, "PRAGMA page_count") == pages
    await store.close()


async def test_usage_of_earlier_days_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "OWNERS_AT_ONCE", 2)
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    owners = ("", "al", "bo", "cy", "di")
    for day in range(20):
        facts = [each for name in owners for each in story(f"{name}{day}", name)]
        await store.append(facts, day * DAY + 1)

    for last in (10, 10, 18):
        await store.prune(last * DAY)

        used = KeyUsage(20, 60, 80, 7)
        assert await store.keys.usage_by_owner(19, owners) == dict.fromkeys(
            owners, used
        )
        for name in owners:
            assert await store.keys.usage_of(name, 19) == used
        rows = len(owners) * (20 - last + 1)
        assert await value(store, "SELECT count(*) FROM usage") == rows
    await store.close()
