"""Large works in the SQLite store: written before their jobs, between other commits."""

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from harness.databases import put_new_database
from shoal.domain.credentials import DAY
from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.store.codec import PART_SIZE
from shoal.store.sql import work_parts
from shoal.store.sqlite.database import SqliteStore
from store.metered import MeteredStore
from store.query_plans import check_plans, recorded_statements

T = TypeVar("T")

PARTS = 8
NOISE = random.Random(0).randbytes(PARTS * PART_SIZE // 2 - 1000).hex()
LARGE = Chat("m", ({"role": "user", "content": NOISE},))
SMALL = Chat("m", ({"role": "user", "content": "hi"},))
W, ONE = WorkerId("w"), LeaseNumber(1)
WRITTEN_MAX = (
    2 * PART_SIZE
)  # by a transaction: a part, its index, its page's neighbours


async def submit(store: SqliteStore, job: Job) -> None:
    await store.prepare(job)
    await store.append([JobSubmitted(job)], 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shoal.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[MeteredStore]:
    store = await opened(path)
    yield store
    await store.close()


async def opened(path: Path) -> MeteredStore:
    put_new_database(path)
    store = MeteredStore(path)
    await store.open()
    return store


def job(name: str = "j", work: Chat = LARGE) -> Job:
    return Job(JobId(name), work, owner="al", idempotency_key=name)


async def count(store: SqliteStore, table: str = "work_parts") -> int:
    query = f"SELECT count(*) FROM {table}"
    ((rows,),) = await store.database.read(lambda sql: sql.execute(query).fetchall())
    return int(rows)


async def test_large_work_is_stored_whole(store: MeteredStore) -> None:
    large = job()
    await store.prepare(large)
    assert await store.job(large.id) is None

    await store.append([JobSubmitted(large)], 1.0)

    stored = await store.job(large.id)
    assert stored is not None
    assert stored.job == large
    assert [each.job for each in await store.open_jobs()] == [large]
    assert await store.by_idempotency_key("al", "j") == stored
    assert [each.fact for each in await store.history(large.id)] == [
        JobSubmitted(large)
    ]
    assert await count(store) == PARTS
    assert await count(store, "unclaimed_works") == 0


async def test_no_statement_reads_a_whole_table(path: Path) -> None:
    with recorded_statements() as statements:
        store = await opened(path)
        for name in ("a", "b"):
            await store.prepare(job(name))
        await store.append([JobSubmitted(job("a"))], 1.0)
        assert await store.job(JobId("a")) is not None
        store.discard(JobId("b"))
        await store.append([JobCancelled(JobId("a"), "left")], 2.0)
        await store.prune(DAY)
        await store.close()

    check_plans(path, statements)


async def test_job_that_was_not_prepared_is_stored_whole(store: MeteredStore) -> None:
    large = job()

    await store.append([JobSubmitted(large)], 1.0)

    stored = await store.job(large.id)
    assert stored is not None
    assert stored.job == large
    assert await count(store) == PARTS


async def test_no_transaction_writes_all_of_a_large_work(store: MeteredStore) -> None:
    large = job()
    store.forget()

    await store.prepare(large)
    await store.append([JobSubmitted(large)], 1.0)
    await store.append([JobLeased(large.id, W, ONE, "")], 2.0)
    await store.append([JobStarted(large.id, ONE)], 3.0)
    await store.append([JobRequeued(large.id, ONE, "lost")], 4.0)
    await store.append([JobCancelled(large.id, "left", 7)], 5.0)

    written = store.written
    assert len(written) == PARTS + 5
    assert max(written) <= WRITTEN_MAX
    assert sum(written[PARTS:]) <= PART_SIZE
    assert sum(written) < 1.2 * len(NOISE)


async def test_commits_pass_between_the_parts(store: MeteredStore) -> None:
    preparing = [asyncio.create_task(store.prepare(job(f"j{n}"))) for n in range(3)]
    passed = 0
    while not all(each.done() for each in preparing):
        before = len(store.written)
        await store.append([JobSubmitted(job(f"s{passed}", SMALL))], 1.0)
        passed += 1

        # One part may have been under way, and another waits behind this commit.
        assert len(store.written) <= before + 3

    assert passed >= PARTS
    assert await count(store) == 3 * PARTS


async def test_failed_commit_of_a_prepared_job_is_repeated(store: MeteredStore) -> None:
    large = job()
    await store.prepare(large)
    unknown = JobStarted(JobId("unknown"), ONE)

    with pytest.raises(StoreError, match="no job unknown"):
        await store.append([JobSubmitted(large), unknown], 1.0)
    assert await count(store, "unclaimed_works") == 1
    await store.append([JobSubmitted(large)], 1.0)

    stored = await store.job(large.id)
    assert stored is not None
    assert stored.job == large
    assert await count(store, "unclaimed_works") == 0


async def test_usage_of_a_large_job_is_estimated(store: MeteredStore) -> None:
    large = job()
    await store.prepare(large)
    end = JobCancelled(large.id, "left", written=8)

    await store.append([JobSubmitted(large), JobStarted(large.id, ONE), end], 1.0)

    used = await store.keys.usage_of("al", 0)
    assert used.requests == 1
    assert used.prompt_tokens > len(NOISE) / 8
    assert used.completion_tokens == 2


async def test_discarded_parts_are_deleted(store: MeteredStore) -> None:
    kept, small = job("kept"), job("small", SMALL)
    for each in (kept, job("a"), job("b"), small):
        await store.prepare(each)

    for name in ("a", "small", "never prepared"):
        store.discard(JobId(name))
    await store.prepare(job("c"))
    assert await count(store) == 3 * PARTS
    store.discard(JobId("b"))
    store.discard(JobId("c"))
    await store.prune(0.0)

    assert await count(store) == PARTS
    assert await count(store, "unclaimed_works") == 1
    await store.append([JobSubmitted(kept)], 1.0)
    stored = await store.job(kept.id)
    assert stored is not None
    assert stored.job == kept


async def test_a_job_waits_for_the_parts_of_one_other_at_most(
    store: MeteredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_parts, "DELETED_AT_ONCE", 1)
    unused = [f"unused{number}" for number in range(3)]
    for name in unused:
        await store.prepare(job(name))
    for name in unused:
        store.discard(JobId(name))
    store.forget()

    await asyncio.gather(store.prepare(job("a")), store.prepare(job("b")))

    assert await count(store) == (2 + 2) * PARTS
    deleting = PARTS + 1  # the last finds none
    assert len(store.written) == 2 * PARTS + deleting
    await store.prune(0.0)
    assert await count(store) == 2 * PARTS


async def test_parts_of_a_client_that_leaves_are_deleted(store: MeteredStore) -> None:
    preparing = asyncio.create_task(store.prepare(job()))
    while not await count(store):
        pass
    preparing.cancel()
    await asyncio.wait([preparing])
    assert preparing.cancelled()

    await store.prune(0.0)

    assert await count(store) == 0
    assert await count(store, "unclaimed_works") == 0


async def test_parts_of_a_process_that_ended_are_deleted(path: Path) -> None:
    store = await opened(path)
    await submit(store, job("submitted"))
    await store.prepare(job("lost"))
    await store.close()

    store = await opened(path)
    assert await count(store) == 2 * PARTS
    await store.prune(0.0)

    assert await count(store) == PARTS
    (stored,) = await store.open_jobs()
    assert stored.job == job("submitted")
    await store.close()


async def test_parts_that_could_not_be_deleted_are_deleted_later(
    store: MeteredStore,
) -> None:
    await store.prepare(job())
    store.discard(JobId("j"))
    await store.database.transact(
        lambda sql: sql.execute(
            "CREATE TEMP TRIGGER broken BEFORE DELETE ON work_parts "
            "BEGIN SELECT RAISE(FAIL, 'disk I/O error'); END"
        )
    )
    with pytest.raises(StoreError, match="disk I/O error"):
        await store.prune(0.0)

    await store.database.transact(lambda sql: sql.execute("DROP TRIGGER broken"))
    await store.prune(0.0)

    assert await count(store) == 0


async def test_parts_of_a_job_that_is_stored_meanwhile_stay(
    store: MeteredStore,
) -> None:
    await store.prepare(job("unused"))
    await store.prepare(job("kept"))
    store.discard(JobId("unused"))
    read = store.database.read

    async def overtaken(work: Callable[[sqlite3.Connection], T]) -> T:
        found = await read(work)  # that both jobs are unclaimed
        store.database.read = read  # type: ignore[method-assign]
        await store.append([JobSubmitted(job("kept"))], 1.0)
        return found

    store.database.read = overtaken  # type: ignore[method-assign]  # to interleave
    await store.prune(0.0)

    assert store.database.read == read
    assert await count(store) == PARTS
    (stored,) = await store.open_jobs()
    assert stored.job == job("kept")


async def test_pruned_jobs_leave_no_parts(
    store: MeteredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_parts, "DELETED_AT_ONCE", 3)
    for number in range(3):
        await submit(store, job(f"j{number}"))
        ended = JobCancelled(JobId(f"j{number}"), "left")
        await store.append([ended], (number + 1) * DAY)

    assert await store.prune(2.5 * DAY) == 2

    assert await count(store) == PARTS
    stored = await store.job(JobId("j2"))
    assert stored is not None
    assert stored.job == job("j2")


async def test_deleted_job_leaves_no_parts(store: MeteredStore) -> None:
    for name in ("open", "ended"):
        await submit(store, job(name))
    await store.append([JobCancelled(JobId("ended"), "left")], 2.0)

    assert not await store.delete_job(JobId("open"))
    assert await store.delete_job(JobId("ended"))

    assert await count(store) == PARTS
    assert await count(store, "unclaimed_works") == 0
    assert await store.job(JobId("ended")) is None
    stored = await store.job(JobId("open"))
    assert stored is not None
    assert stored.job == job("open")


async def test_no_job_is_without_some_of_its_parts(
    store: MeteredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_parts, "DELETED_AT_ONCE", 1)
    await submit(store, job())
    await store.append([JobCancelled(JobId("j"), "left")], 2.0)

    pruning = asyncio.create_task(store.prune(3.0))
    seen = set()
    while not pruning.done():
        stored = await store.job(JobId("j"))
        assert stored is None or stored.job == job()
        seen.add(stored is None)

    assert True in seen
    assert await count(store) == 0


async def test_failed_commit_of_a_whole_story_is_repeated(store: MeteredStore) -> None:
    large = job()
    story: list[Fact] = [JobSubmitted(large), JobCancelled(large.id, "left")]
    await store.prepare(large)
    unknown = JobStarted(JobId("unknown"), ONE)
    with pytest.raises(StoreError, match="no job unknown"):
        await store.append([*story, unknown], 1.0)

    await store.append(story, 1.0)

    stored = await store.job(large.id)
    assert stored is not None
    assert stored.job == large
