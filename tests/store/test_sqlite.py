"""Durability and files of the SQLite store."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.profiles import some_long
from shoal.domain.errors import StoreError
from shoal.domain.facts import JobCancelled, JobLeased, JobSubmitted, LateResult
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.ledger import accounts
from shoal.pool.lifecycle import JobState
from shoal.store.ledger import LedgerEntries
from shoal.store.port import CommitId, Epoch
from shoal.store.sql.schema import VERSION, VERSION_OF_TABLES
from shoal.store.sqlite import database
from shoal.store.sqlite.database import SqliteStore, is_temporary, reason_of

CHAT = Chat("m", ({"role": "user", "content": "hi"},))

WRITER = """
import asyncio, sys
from pathlib import Path
from shoal.domain.facts import JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.store.sqlite.database import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    for number in range(10_000):
        chat = Chat("m", ({"role": "user", "content": "x" * 2000},))
        await store.append([JobSubmitted(Job(JobId(f"j{number}"), chat))], number)
        print(number, flush=True)

asyncio.run(main())
"""


def submitted(name: str = "j") -> JobSubmitted:
    return JobSubmitted(Job(JobId(name), CHAT))


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    return store


def write_until_killed(path: Path, after: int) -> int:
    """Kill a writer after ``after`` reported jobs; return how many it reported."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        stored = 0
        for line in writer.stdout:
            stored = int(line) + 1
            if stored == after:
                writer.kill()
    return stored


def remove(path: Path) -> None:
    path.unlink()


async def pragma(store: SqliteStore, name: str) -> object:
    """Return the value of a pragma of the connection that writes."""
    return await store.database.transact(
        lambda sql: sql.execute(f"PRAGMA {name}").fetchone()[0]
    )


def make(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shoal.db"


async def test_contents_survive_reopening(path: Path) -> None:
    store = await opened(path)
    lease = JobLeased(JobId("j"), WorkerId("w"), LeaseNumber(1), "")
    await store.append([submitted(), lease], 5.0)
    before = await store.open_jobs(), await store.history(JobId("j"))
    await store.close()

    store = await opened(path)

    assert (await store.open_jobs(), await store.history(JobId("j"))) == before
    assert before[0][0].state is JobState.LEASED
    await store.close()


async def test_every_commit_is_synchronous(path: Path) -> None:
    store = await opened(path)

    assert await pragma(store, "journal_mode") == "wal"
    assert await pragma(store, "synchronous") == 2  # FULL
    assert await pragma(store, "user_version") == VERSION
    await store.close()


@pytest.mark.parametrize("after", some_long([10, 1, 100], short=1))
async def test_stored_jobs_survive_a_kill(path: Path, after: int) -> None:
    stored = write_until_killed(path, after)

    store = await opened(path)

    jobs = await store.open_jobs()
    names = [job.job.id for job in jobs]
    # One more may be stored than was reported.
    assert names == [f"j{number}" for number in range(len(names))]
    assert stored <= len(names) <= stored + 1
    for job_id in names:
        assert len(await store.history(job_id)) == 1
    await store.close()


async def test_second_process_on_the_same_file_is_rejected(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_ATTEMPTS", 2)
    store = await opened(path)
    second = SqliteStore(path)

    with pytest.raises(StoreError, match=r"is in use: stop the other.*--data-dir"):
        await second.open()

    await second.close()
    await store.append([submitted()], 1.0)
    await store.close()
    third = await opened(path)
    assert len(await third.open_jobs()) == 1
    await third.close()


async def test_each_owner_of_a_database_has_an_epoch_of_its_own(path: Path) -> None:
    first = await opened(path)
    epoch = await first.take_over()
    await first.append([submitted()], 1.0, commit=CommitId(epoch, "hub", 1))
    await first.close()
    second = await opened(path)

    assert await second.take_over() == epoch + 1

    await second.append([], 2.0, commit=CommitId(Epoch(epoch + 1), "hub", 1))
    await second.close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (VERSION + 1, "install the newer Shoal"),
        (VERSION_OF_TABLES - 1, "from before the first release"),
    ],
)
async def test_database_of_an_unknown_version_is_not_changed(
    path: Path, version: int, message: str
) -> None:
    with closing(sqlite3.connect(path)) as sql:
        sql.execute(f"PRAGMA user_version = {version}")

    store = SqliteStore(path)
    with pytest.raises(StoreError, match=message):
        await store.open()
    await store.close()

    with closing(sqlite3.connect(path)) as sql:
        tables = sql.execute("SELECT name FROM sqlite_master").fetchall()
        assert tables == []


async def test_empty_file_becomes_a_database(path: Path) -> None:
    make(path, b"")

    store = await opened(path)

    await store.append([submitted()], 1.0)
    assert len(await store.open_jobs()) == 1
    await store.close()


@pytest.mark.parametrize(
    "content",
    [b"no database at all " * 1000, b"SQLite format 3\0" + b"\xff" * 8192],
    ids=["text", "damaged"],
)
async def test_damaged_file_is_rejected_unchanged(path: Path, content: bytes) -> None:
    make(path, content)

    store = SqliteStore(path)
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.close()

    assert "shoal.db: " in caught.value.located
    assert not caught.value.temporary
    assert content_of(path) == content


async def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "none" / "shoal.db")

    with pytest.raises(StoreError, match="unable to open"):
        await store.open()

    await store.close()


async def test_unwritable_file_is_rejected(tmp_path: Path) -> None:
    # A folder in its place, which also stops root.
    path = tmp_path / "shoal.db"
    path.mkdir()
    store = SqliteStore(path)

    with pytest.raises(StoreError) as caught:
        await store.open()

    assert "shoal.db: " in caught.value.located
    await store.close()


async def test_full_disk_is_a_recoverable_error(path: Path) -> None:
    store = await opened(path)
    await store.append([submitted("before")], 1.0)
    pages = await pragma(store, "page_count")
    await pragma(store, f"max_page_count = {pages}")
    text = random.Random(0).randbytes(500_000).hex()  # hard to compress
    large = Chat("m", ({"role": "user", "content": text},))

    with pytest.raises(StoreError, match="full") as caught:
        await store.append(
            [submitted("small"), JobSubmitted(Job(JobId("large"), large))], 2.0
        )
    assert caught.value.temporary

    await pragma(store, "max_page_count = 1000000")
    assert [job.job.id for job in await store.open_jobs()] == ["before"]
    await store.append([submitted("after")], 3.0)
    assert len(await store.open_jobs()) == 2
    await store.close()


async def test_another_programs_lock_is_a_recoverable_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.store.sqlite.database.BUSY_TIMEOUT", 0.05)
    store = await opened(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreError, match="locked") as caught:
            await store.append([submitted("before")], 1.0)
        assert caught.value.temporary
        other.execute("ROLLBACK")

    await store.append([submitted("after")], 2.0)
    assert [job.job.id for job in await store.open_jobs()] == ["after"]
    await store.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_gone_is_written_no_more(
    path: Path, replaced: bool
) -> None:
    store = await opened(path)
    remove(path)
    if replaced:
        make(path, b"")

    with pytest.raises(StoreError, match="deleted or replaced") as caught:
        await store.append([submitted()], 1.0)

    assert not caught.value.temporary
    assert str(path) in caught.value.located
    await store.close()


def test_a_failing_disk_is_named(tmp_path: Path) -> None:
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    failed.sqlite_errorname = "SQLITE_IOERR_FSYNC"
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    reason = reason_of(failed, tmp_path / "shoal.db")

    assert reason.startswith("disk I/O error (SQLITE_IOERR_FSYNC): mostly EIO")
    assert reason_of(full, tmp_path / "shoal.db") == "database or disk is full"


@pytest.mark.parametrize(
    ("code", "temporary"),
    [
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_IOERR_WRITE, True),
        (sqlite3.SQLITE_IOERR_FSYNC, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, True),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, True),
        (sqlite3.SQLITE_CANTOPEN, True),
        (sqlite3.SQLITE_IOERR_SHORT_READ, False),
        (sqlite3.SQLITE_IOERR_CORRUPTFS, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_NOTADB, False),
        (sqlite3.SQLITE_READONLY_DBMOVED, False),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, False),
        (None, False),  # of the module itself, as for a closed connection
    ],
)
def test_errors_of_the_disk_are_temporary(code: int | None, temporary: bool) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    if code is not None:
        error.sqlite_errorcode = code

    assert is_temporary(error) is temporary


async def test_failed_prune_does_not_stop_the_store(path: Path) -> None:
    store = await opened(path)
    await store.append([submitted(), JobCancelled(JobId("j"), "")], 1.0)
    await store.database.transact(
        lambda sql: sql.execute(
            "CREATE TEMP TRIGGER broken BEFORE DELETE ON jobs "
            "BEGIN SELECT RAISE(FAIL, 'disk I/O error'); END"
        )
    )

    with pytest.raises(StoreError, match="disk I/O error"):
        await store.prune(10.0)

    await store.append([submitted("k")], 2.0)
    assert len(await store.history(JobId("j"))) == 2
    await store.close()


async def test_late_facts_of_pruned_jobs_are_deleted(path: Path) -> None:
    store = await opened(path)
    late = LateResult(JobId("gone"), LeaseNumber(1), WorkerId("w"), "completed")

    await store.append([late], 1.0)

    count = await store.database.transact(
        lambda sql: sql.execute("SELECT count(*) FROM facts").fetchone()[0]
    )
    assert count == 0
    await store.close()


async def test_closed_store_raises_an_error(path: Path) -> None:
    unopened = SqliteStore(path)

    with pytest.raises(StoreError, match="not open"):
        await unopened.open_jobs()

    await unopened.close()
    assert content_of(path) is None


async def test_accounts_can_be_queried_with_sql(path: Path) -> None:
    store = await opened(path)
    await store.append([], 1.0, (), LedgerEntries(accounts.credit("user:al", 7)))
    await store.close()

    with closing(sqlite3.connect(path)) as sql:
        (total,) = sql.execute("SELECT sum(balance) FROM accounts").fetchone()
        moved = sql.execute("SELECT debit, credit, amount FROM transfers")
        assert total == 0
        assert moved.fetchall() == [("world", "user:al", 7)]
