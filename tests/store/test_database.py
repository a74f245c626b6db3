"""Reads beside the writer, and the files of an SQLite database."""

import asyncio
import shutil
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from shoal.config.private_files import create_private
from shoal.domain.errors import StoreBroken, StoreError
from shoal.store.sql.database import LIST_READERS
from shoal.store.sqlite import database as module
from shoal.store.sqlite.database import SqliteDatabase

COUNT = "SELECT count(*) FROM payments"
LONG_QUERY = """
    WITH RECURSIVE numbers (n) AS (
        SELECT count(*) FROM payments
        UNION ALL SELECT n + 1 FROM numbers LIMIT 50000)
    SELECT max(n) FROM numbers"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shoal.db"


@pytest.fixture
async def database(path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = SqliteDatabase(path)
    await opened.open()
    yield opened
    await opened.close()


def add(reference: str, size: int = 1) -> Callable[[sqlite3.Connection], object]:
    def work(sql: sqlite3.Connection) -> object:
        values = (reference, "x" * size, 1.0)
        return sql.execute("INSERT INTO payments VALUES (?, ?, ?)", values)

    return work


def count(sql: sqlite3.Connection) -> int:
    ((rows,),) = sql.execute(COUNT)
    return int(rows)


async def write_and_close(path: Path) -> None:
    """Leave a database whose last pages are those of rows."""
    database = SqliteDatabase(path)
    await database.open()
    for number in range(50):
        await database.transact(add(f"{number}", 3_000))
    await database.close()


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def take_name(file: Path, how: str) -> None:
    """Delete a file, or put another one with its content in its place."""
    kept = file.read_bytes()
    file.unlink()
    if how == "replaced":
        file.write_bytes(kept)


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def overwrite_end(file: Path, data: bytes) -> None:
    kept = file.read_bytes()
    file.write_bytes(kept[: -len(data)] + data)


def content_of(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


class SlowRead:
    """A read that goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()

    def __call__(self, sql: sqlite3.Connection) -> tuple[int, int]:
        """Return the number of rows at the beginning and at the end."""
        first = count(sql)
        self.begun.set()
        self.end.wait()
        return first, count(sql)


@contextmanager
def slow_reads(number: int) -> Iterator[list[SlowRead]]:
    """Provide reads that end with the block, if not before."""
    reads = [SlowRead() for _ in range(number)]
    try:
        yield reads
    finally:
        for each in reads:
            each.end.set()


@asynccontextmanager
async def continual_reads(database: SqliteDatabase) -> AsyncIterator[None]:
    """Run lists one after the other within the block, several at once."""
    stop = asyncio.Event()

    async def read_on() -> None:
        while not stop.is_set():
            await database.read_list(lambda sql: sql.execute(LONG_QUERY).fetchall())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(LIST_READERS):
            tasks.create_task(read_on())
        try:
            yield
        finally:
            stop.set()


async def test_commits_and_short_reads_do_not_wait_for_lists(
    database: SqliteDatabase,
) -> None:
    with slow_reads(LIST_READERS + 10) as reads:
        listing = [asyncio.create_task(database.read_list(each)) for each in reads]
        for each in reads[:LIST_READERS]:
            await asyncio.to_thread(each.begun.wait)

        for name in ("a", "b"):
            await database.transact(add(name))
        assert await database.read(count) == 2

        assert not any(each.done() for each in listing)
    assert await asyncio.gather(*listing[:LIST_READERS]) == [(0, 0)] * LIST_READERS
    assert await asyncio.gather(*listing[LIST_READERS:]) == [(2, 2)] * 10


async def test_reads_cannot_write(database: SqliteDatabase) -> None:
    for read in (database.read, database.read_list):
        with pytest.raises(StoreError, match="readonly"):
            await read(add("a"))

    assert await database.read(count) == 0


async def test_failed_read_leaves_its_connection_usable(
    database: SqliteDatabase,
) -> None:
    def fail(sql: sqlite3.Connection) -> None:
        sql.execute(COUNT).fetchone()
        raise StoreError("no")

    for _ in range(LIST_READERS + 1):
        with pytest.raises(StoreError, match="no"):
            await database.read_list(fail)
        with pytest.raises(StoreError, match="syntax error"):
            await database.read_list(lambda sql: sql.execute("SELEKT"))

    assert await database.read_list(count) == 0


async def test_reads_under_way_end_before_the_database_closes(path: Path) -> None:
    database = SqliteDatabase(path)
    await database.open()
    with slow_reads(1) as (read,):
        listing = asyncio.create_task(database.read_list(read))
        await asyncio.to_thread(read.begun.wait)
        closing_ = asyncio.create_task(database.close())
        read.end.set()

        assert await listing == (0, 0)
    await closing_
    with pytest.raises(StoreError, match="not open"):
        await database.transact(lambda sql: None)
    with pytest.raises(StoreError, match="not open"):
        await database.read(count)


async def test_other_programs_can_read_an_open_database(
    database: SqliteDatabase, path: Path
) -> None:
    await database.transact(add("a"))

    with (
        closing(sqlite3.connect(path)) as other,
        closing(sqlite3.connect(":memory:")) as copy,
    ):
        assert count(other) == 1
        other.backup(copy)
        assert count(copy) == 1
    await database.transact(add("b"))


async def test_overlapping_reads_do_not_let_the_log_grow(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAL_MAX", 1 << 16)
    monkeypatch.setattr(module, "WAL_WAIT", 60.0)
    database = SqliteDatabase(path)
    await database.open()
    wal = path.with_name("shoal.db-wal")

    async with continual_reads(database):
        for number in range(20):
            await database.transact(add(f"{number}", 100_000))

        assert wal.stat().st_size < 1 << 20  # of 2 MB
    await database.close()


async def test_a_long_read_of_another_program_delays_few_commits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAL_MAX", 1 << 18)
    monkeypatch.setattr(module, "WAL_WAIT", 0.0)
    database = SqliteDatabase(path)
    await database.open()
    checkpoints: list[str] = []

    def trace(sql: sqlite3.Connection) -> None:
        sql.set_trace_callback(checkpoints.append)

    await database.transact(trace)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        assert count(other) == 0
        for number in range(40):
            await database.transact(add(f"{number}", 25_000))
    size = path.with_name("shoal.db-wal").stat().st_size
    await database.close()

    attempts = [each for each in checkpoints if "wal_checkpoint" in each]
    assert 0 < len(attempts) <= size // module.WAL_MAX


@pytest.mark.skipif(sys.platform == "win32", reason="files in use stay on Windows")
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_no_commit_goes_to_a_file_that_has_lost_its_name(
    path: Path, suffix: str, how: str
) -> None:
    database = SqliteDatabase(path)
    await database.open()
    await database.transact(add("a"))
    file = beside(path, suffix)
    take_name(file, how)

    with pytest.raises(StoreBroken, match="deleted or replaced") as caught:
        await database.transact(add("b"))

    assert caught.value.path == str(file)
    assert await database.wait_damaged() is caught.value
    await database.close()


@pytest.mark.skipif(sys.platform == "win32", reason="files in use stay on Windows")
@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_file_that_loses_its_name_during_a_commit_is_noticed(
    path: Path, how: str
) -> None:
    database = SqliteDatabase(path)
    await database.open()
    await database.transact(lambda _: take_name(path, how))

    with pytest.raises(StoreBroken, match="deleted or replaced"):
        await database.transact(add("b"))
    await database.close()


@pytest.mark.skipif(sys.platform == "win32", reason="files in use stay on Windows")
async def test_commits_in_a_deleted_log_are_saved_when_that_is_noticed(
    path: Path, tmp_path: Path
) -> None:
    database = SqliteDatabase(path)
    await database.open()
    await database.transact(add("a"))
    for suffix in ("-wal", "-shm"):
        take_name(beside(path, suffix), "deleted")

    with pytest.raises(StoreBroken):
        await database.check()

    # As after a kill: what the open files have is gone.
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    with closing(sqlite3.connect(copy)) as other:
        assert count(other) == 1
    await database.close()


@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_truncation_is_noticed_without_a_read(path: Path, suffix: str) -> None:
    await write_and_close(path)
    database = SqliteDatabase(path)
    await database.open()
    await database.transact(add("more", 100_000))
    truncate(beside(path, suffix), 20_000)

    with pytest.raises(StoreBroken):
        await database.check()
    with pytest.raises(StoreBroken):
        await database.transact(add("b"))
    await database.close()


async def test_a_log_that_another_program_has_emptied_is_no_damage(
    database: SqliteDatabase, path: Path
) -> None:
    await database.transact(add("a", 100_000))
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert content_of(beside(path, "-wal")) == b""

    await database.check()
    await database.transact(add("b"))

    assert await database.read(count) == 2


async def test_a_database_that_another_program_has_compacted_is_no_damage(
    database: SqliteDatabase, path: Path
) -> None:
    await database.transact(add("a", 100_000))
    await database.transact(lambda sql: sql.execute("DELETE FROM payments"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        await database.check()
        before = len(content_of(path) or b"")
        other.execute("VACUUM")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert 0 < len(content_of(path) or b"") < before

    await database.check()
    await database.transact(add("b"))

    assert await database.read(count) == 1


async def test_a_read_of_a_damaged_page_is_reported(path: Path) -> None:
    await write_and_close(path)
    overwrite_end(path, b"\xff" * 40_000)
    database = SqliteDatabase(path)
    await database.open()

    with pytest.raises(StoreBroken) as caught:
        await database.read(
            lambda sql: sql.execute("SELECT * FROM payments").fetchall()
        )

    assert await database.wait_damaged() is caught.value
    await database.close()


async def test_a_damaged_beginning_is_noticed_without_a_read(path: Path) -> None:
    await write_and_close(path)
    database = SqliteDatabase(path)
    await database.open()
    with closing(sqlite3.connect(path)) as other:  # the log has no newer one
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    with path.open("r+b") as file:
        file.write(b"nothing of SQLite's")

    with pytest.raises(StoreBroken, match="not a database"):
        await database.check()
    await database.close()


@pytest.mark.parametrize("content", [None, b""])
async def test_a_database_is_not_begun_anew_unasked(
    path: Path, content: bytes | None
) -> None:
    if content is not None:
        create_private(path)

    with pytest.raises(StoreBroken, match="is missing" if content is None else "empty"):
        await SqliteDatabase(path).open(create=False)

    assert content_of(path) == content


async def test_reads_see_what_was_written_before(database: SqliteDatabase) -> None:
    writes = [asyncio.create_task(database.transact(add(f"{n}"))) for n in range(100)]
    await asyncio.sleep(0)

    assert await database.read(count) == 100
    await asyncio.gather(*writes)


async def test_reads_do_not_wait_for_later_transactions(
    database: SqliteDatabase,
) -> None:
    with slow_reads(1) as (slow,):
        reading = asyncio.create_task(database.read(count))
        await asyncio.sleep(0)
        writing = asyncio.create_task(database.transact(slow))

        assert await reading == 0
        assert not writing.done()
    await writing


async def test_failed_transaction_does_not_stop_reads(database: SqliteDatabase) -> None:
    failing = asyncio.create_task(database.transact(lambda sql: sql.execute("SELEKT")))
    await asyncio.sleep(0)

    assert await database.read(count) == 0
    with pytest.raises(StoreError, match="syntax error"):
        await failing
