"""What only PostgreSQL does: its server fails, is shared, and refuses some texts."""

import asyncio
import sqlite3
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import psycopg
import pytest

from harness.postgres import POOLER, PostgresServer, postgres_server
from harness.speed import PATIENCE
from shoal.domain.errors import Fenced, InUse, StoreBroken, StoreError
from shoal.domain.facts import JobSubmitted, WorkerMarked
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job
from shoal.domain.work import Task
from shoal.ledger import accounts
from shoal.store.blobs import BlobFiles
from shoal.store.file_folder import FileFolder
from shoal.store.ledger import LedgerEntries
from shoal.store.port import CommitId, JobFilter
from shoal.store.postgres import database as module
from shoal.store.postgres import maintenance
from shoal.store.postgres.contents import (
    BLOBS,
    FILES,
    PART_SIZE,
    SESSIONS_MAX,
    ContentRows,
    ContentSessions,
)
from shoal.store.postgres.database import PostgresStore
from shoal.store.postgres.lease import PostgresLease
from shoal.store.postgres.maintenance import copy
from shoal.store.postgres.schema import migrate
from shoal.store.postgres.session import Session, connect, translated
from shoal.store.sql.schema import VERSION, VERSION_OF_TABLES
from shoal.store.sql.store import SqlStore
from shoal.store.sqlite import database as sqlite_database
from shoal.store.sqlite.database import SqliteStore
from store.test_ledger import StoredLog
from store.test_written import opened

TEXTS = [
    "",
    "\0",
    "\1",
    "\2",
    "a\0b",
    "a\1b",
    "\1\1",
    "\1\2",
    "\0\1\2",
    "é\0\U0010ffff",
]
END_OTHERS = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()"""
CREDIT = LedgerEntries(accounts.credit("user:al", 7))


@pytest.fixture
def url(database_url: str) -> str:
    return database_url


def submitted(number: int) -> JobSubmitted:
    return JobSubmitted(Job(JobId(f"j{number}"), Task("hi")))


async def ids(store: PostgresStore) -> list[str]:
    return [each.job.id for each in await store.open_jobs()]


def run_apart(url: str, statement: str) -> None:
    """Run a statement in a session of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


class Column(NamedTuple):
    """A column of a table; ``needed``: each row must have it."""

    table: str
    name: str
    kind: str
    needed: bool


COLUMNS = """SELECT table_name, column_name, data_type, is_nullable = 'NO'
                 AND column_default IS NULL AND is_identity = 'NO'
             FROM information_schema.columns
             WHERE table_schema = 'public' AND table_name <> 'schema_version'"""
SAMPLES = {
    "text": "x",
    "bytea": b"x",
    "bigint": 1,
    "integer": 1,
    "boolean": True,
    "double precision": 1.0,
    "timestamp with time zone": datetime(2026, 1, 1, tzinfo=UTC),
}


async def test_every_text_column_has_any_text(url: str) -> None:
    store = PostgresStore(url)
    await store.open()

    def survives(sql: Session, columns: list[Column], wanted: Column) -> None:
        row = {
            each.name: SAMPLES[each.kind]
            for each in columns
            if each.table == wanted.table and each.needed
        }
        for text in TEXTS:
            row[wanted.name] = text
            names = ", ".join(f'"{name}"' for name in row)
            marks = ", ".join("?" * len(row))
            for table in ("deleted_places", wanted.table, "deleted_places"):
                sql.execute(f"DELETE FROM {table}")
            query = f"INSERT INTO {wanted.table} ({names}) VALUES ({marks})"
            sql.execute(query, (*row.values(),))
            found = sql.execute(f'SELECT "{wanted.name}" FROM {wanted.table}')
            assert found.fetchall() == [(text,)], wanted

    def survive(sql: Session) -> int:
        columns = [Column(*each) for each in sql.execute(COLUMNS).fetchall()]
        texts = [each for each in columns if each.kind == "text"]
        for each in texts:
            survives(sql, columns, each)
        return len(texts)

    assert await store.database.transact(survive) > 60
    await store.close()


async def test_texts_have_the_order_of_python(url: str) -> None:
    session = Session(connect(url))
    session.executescript('CREATE TABLE t (x text COLLATE "C")')
    session.executemany("INSERT INTO t VALUES (?)", [(each,) for each in TEXTS])

    found = [x for (x,) in session.execute("SELECT x FROM t ORDER BY x").fetchall()]

    assert found == sorted(TEXTS)
    session.close()


def test_placeholders_of_all_kinds_are_translated() -> None:
    assert translated("a = ? AND b = ?") == ("a = $1 AND b = $2", None)
    assert translated("a = ?2 AND b = ?1") == ("a = $2 AND b = $1", None)
    assert translated("a = :a AND b = :b OR :a") == (
        "a = $1 AND b = $2 OR $1",
        ["a", "b"],
    )


async def test_a_database_in_use_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_ATTEMPTS", 1)
    first, second = PostgresStore(url), PostgresStore(url)
    await first.open()

    with pytest.raises(
        StoreError, match=r"is in use by .*, process \d+ since 20"
    ) as no:
        await second.open()
    assert no.value.located.count("postgresql://") == 1

    await first.append([submitted(1)], 1.0)
    await first.close()
    await second.open()
    assert await ids(second) == ["j1"]
    await second.close()


async def test_newer_database_is_not_changed(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await store.close()
    run_apart(url, f"UPDATE schema_version SET version = {VERSION + 1}")

    with pytest.raises(StoreError, match="install the newer Shoal that wrote it"):
        await PostgresStore(url).open()


async def test_a_database_is_not_begun_anew_unasked(url: str) -> None:
    store = PostgresStore(url)
    with pytest.raises(StoreBroken, match="is empty"):
        await store.open(create=False)

    await store.open()
    assert await ids(store) == []
    await store.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("postgresql://shoal@127.0.0.1:1/x", "refused"),
        ("postgresql://shoal@no-such-host.invalid/x", "no-such-host.invalid"),
        ("{url}?sslmode=sometimes", "sslmode"),
        ("{url}?sslmode=require", "SSL"),
        ("{url}_missing", "does not exist"),
        ("{url}?color=red", "color"),
        ("postgresql://[", "URL"),
    ],
)
async def test_what_cannot_be_reached_says_why(
    url: str, changed: str, message: str
) -> None:
    with pytest.raises(StoreError) as raised:
        await PostgresStore(changed.format(url=url)).open()

    assert message in raised.value.located


async def test_errors_do_not_show_the_password() -> None:
    with pytest.raises(StoreError) as raised:
        await PostgresStore("postgresql://al:secret@127.0.0.1:1/x").open()

    assert "secret" not in raised.value.located
    assert "postgresql://al@127.0.0.1:1/x" in raised.value.located


async def test_wrong_password_is_named(url: str, postgres: PostgresServer) -> None:
    run_apart(url, "CREATE ROLE al LOGIN PASSWORD 'right'")
    with postgres.passwords(), pytest.raises(StoreError) as raised:
        await PostgresStore(url.replace("shoal@", "al:wrong@")).open()
    assert "password authentication failed" in raised.value.located
    run_apart(url, "DROP ROLE al")


@pytest.mark.parametrize("limited", ["ROLE al", "DATABASE {name}"])
async def test_a_limit_of_connections_is_named(url: str, limited: str) -> None:
    """At the start, and when they run out later, which ends by itself."""
    name = url.rpartition("/")[2]
    run_apart(url, "CREATE ROLE al LOGIN; GRANT ALL ON SCHEMA public TO al")
    limit = f"ALTER {limited.format(name=name)} CONNECTION LIMIT"
    try:
        store = PostgresStore(url.replace("shoal@", "al@"))
        run_apart(url, f"{limit} 3")
        with pytest.raises(StoreError, match="raise its max_connections"):
            await store.open()
        run_apart(url, f"{limit} {module.CONNECTIONS_MAX}")
        store = PostgresStore(url.replace("shoal@", "al@"))
        await store.open()

        run_apart(url, f"{limit} 0")
        run_apart(url, END_OTHERS)
        with pytest.raises(StoreError, match="raise its max_connections") as raised:
            await store.append([submitted(1)], 1.0)
        assert raised.value.temporary
        run_apart(url, f"{limit} -1")

        await store.append([submitted(2)], 2.0)
        assert await ids(store) == ["j2"]
        await store.close()
    finally:
        run_apart(url, "DROP OWNED BY al; DROP ROLE al")


@pytest.mark.long
@pytest.mark.parametrize("role", ["al", "shoal"])
async def test_a_server_without_connections_left_is_named(role: str) -> None:
    few = ("max_connections=5", "superuser_reserved_connections=1")
    with postgres_server(*few, "max_wal_senders=0") as server, ExitStack() as held:
        run_apart(server.url(), "CREATE ROLE al LOGIN")
        url = server.url().replace("shoal@", f"{role}@")
        with suppress(psycopg.OperationalError):
            while True:
                held.enter_context(psycopg.connect(url))

        with pytest.raises(StoreError, match="raise its max_connections"):
            await PostgresStore(url).open()
        with pytest.raises(StoreError, match="raise its max_connections"):
            await PostgresLease(url).look()


async def test_a_coordinator_has_no_more_connections_than_it_says(url: str) -> None:
    store, lease = PostgresStore(url), PostgresLease(url)
    await store.open()
    await lease.look()
    with closing(ContentSessions(url)) as contents:
        together = Barrier(SESSIONS_MAX)
        counts = await asyncio.gather(
            *(
                asyncio.to_thread(contents.run, partial(count_others, together))
                for _ in range(SESSIONS_MAX)
            )
        )
    assert counts == [module.CONNECTIONS_MAX - 1] * SESSIONS_MAX
    lease.close()
    await store.close()


def count_others(together: Barrier, sql: Session) -> int:
    """Return how many sessions the database has, once all ask for it."""
    together.wait()
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    found = sql.execute(query).fetchone()[0]
    together.wait()
    return int(found)


async def test_encoding_that_lacks_characters_is_refused(
    postgres: PostgresServer,
) -> None:
    run_apart(
        postgres.url("template1"),
        "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0",
    )
    with pytest.raises(StoreError, match="ENCODING 'UTF8'"):
        await PostgresStore(postgres.url("latin")).open()
    run_apart(postgres.url("template1"), "DROP DATABASE latin WITH (FORCE)")


@pytest.mark.long
@pytest.mark.skipif(POOLER is None, reason="needs pgbouncer")
async def test_a_pooler_of_transactions_is_refused(postgres: PostgresServer) -> None:
    with postgres.pooler("transaction") as url, pytest.raises(StoreError) as raised:
        await PostgresStore(url).open()
    assert "pool_mode = session" in raised.value.located
    # It has left no lock on the pooler's sessions.
    with postgres.pooler("session") as url:
        store = PostgresStore(url)
        await store.open()
        await store.append([submitted(1)], 1.0)
        assert await ids(store) == ["j1"]
        await store.close()


async def test_a_lost_session_is_replaced(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await store.append([submitted(1)], 1.0)

    run_apart(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()",
    )

    await store.append([submitted(2)], 2.0)
    assert await ids(store) == ["j1", "j2"]
    assert await store.job(JobId("j2")) is not None
    await store.close()


async def test_a_session_lost_to_another_coordinator_is_not_replaced(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    run_apart(url, "UPDATE lease SET holder = 'another'")
    run_apart(url, "SELECT pg_terminate_backend(pid) FROM lease")

    with pytest.raises(Fenced, match="another coordinator has taken over"):
        await store.append([submitted(1)], 1.0)

    await store.close()


async def test_a_node_whose_lock_another_has_is_fenced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its network was cut: it stands by then, and does not fail.

    It does not wait for the lock: its first process would kill it as silent.
    """
    monkeypatch.setattr(module, "LOCK_PAUSE", PATIENCE)
    store, other = (PostgresStore(url, node=f"10.0.0.{each}:4011") for each in (1, 2))
    await store.open()
    run_apart(url, "SELECT pg_terminate_backend(pid) FROM lease")
    await until_open(other)

    with pytest.raises(Fenced, match="another coordinator has taken over"):
        await store.append([submitted(1)], 1.0)

    await store.close()
    await other.append([submitted(2)], 2.0, commit=None)
    await other.close()


async def until_open(store: PostgresStore) -> None:
    """Open a node's store; the server ends a session a moment after it was asked to."""
    while True:
        try:
            return await store.open()
        except InUse:
            continue


@pytest.mark.long
async def test_a_coordinator_stopped_in_a_transaction_holds_nothing_for_ever(
    url: str,
) -> None:
    store = PostgresStore(url)
    await store.open()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(sql: Session) -> None:
        sql.execute("UPDATE writers SET number = number")
        loop.call_soon_threadsafe(stopped.set)
        # As long as the server lets it: a takeover waits for this row.
        run_apart(url, "UPDATE writers SET number = number")
        sql.execute("SELECT 1")

    with pytest.raises(StoreError, match="idle-in-transaction") as raised:
        await store.database.transact(stop)

    assert stopped.is_set()
    assert raised.value.temporary
    await store.append([submitted(1)], 1.0)
    await store.close()


@pytest.mark.long
async def test_a_commit_counts_once_whenever_the_server_is_killed() -> None:
    with postgres_server() as server:
        store = PostgresStore(server.url())
        await store.open()
        epoch = await store.take_over()
        killed = 0

        async def kill_now_and_then() -> None:
            nonlocal killed
            for _ in range(3):
                await asyncio.sleep(0)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                killed += 1

        killing = asyncio.create_task(kill_now_and_then())
        number = failed = 0
        while not killing.done() or number < 50:
            number += 1
            commit = CommitId(epoch, "hub", number)
            while True:
                try:
                    await store.append([submitted(number)], 1.0, (), CREDIT, commit)
                    break
                except StoreError as error:
                    if not error.temporary:
                        raise
                    failed += 1
                    await asyncio.sleep(0.01)
        await killing
        assert killed == 3
        assert failed
        assert await ids(store) == [f"j{each + 1}" for each in range(number)]
        assert (await store.ledger.load()).accounts["user:al"].balance == 7 * number
        await store.close()


async def test_a_check_finds_what_is_wrong(url: str) -> None:
    with pytest.raises(StoreError, match="the database cannot be reached"):
        maintenance.check("postgresql://shoal@127.0.0.1:1/x")
    assert "version 0, expected" in maintenance.check(url)[0]
    store = PostgresStore(url)
    await store.open()
    log = StoredLog(store)
    for number in range(3):
        await log.add(f"j{number}")
    assert maintenance.check(url) == []  # beside the coordinator
    assert maintenance.size_and_root(url, 3)[0] == 3

    run_apart(url, "INSERT INTO accounts VALUES ('user:al', 7)")
    run_apart(url, "DELETE FROM receipts WHERE leaf = 1")

    assert maintenance.check(url) == [
        "the accounts sum to 7 micro-dollars, expected 0",
        "receipt 1 is missing",
    ]
    await store.close()


async def contents(store: SqlStore) -> list[object]:
    """Return what a store has, as far as it was written by earlier versions."""
    ids = [each.id for each in (await store.recent(JobFilter(), 100)).jobs]
    return [
        [await store.job(each) for each in ids],
        [await store.history(each) for each in ids],
        [await store.summary(each) for each in ids],
        [await store.webhooks.state_of(each) for each in ids],
        [await store.ledger.receipts_of(each) for each in ids],
        await store.open_jobs(),
        await store.worker_facts(100),
        await store.keys.keys.all(),
        await store.keys.tokens.all(),
        await store.keys.usage_by_owner(0, ["default"]),
        await store.usage.sums(0, 100_000, ["day", "key", "model", "node"], 100),
        await store.usage.minutes(0),
        await store.ledger.load(),
        await store.ledger.transfers("user:al", 100),
        await store.trusted_workers(),
        await store.suspensions(),
        await store.approvals(),
        await store.aliases(),
        await store.deployments(),
        await store.batches.listed(None, None, 100),
        await store.take_over(),
    ]


@pytest.mark.parametrize("version", [VERSION_OF_TABLES, VERSION])
async def test_a_file_of_any_version_can_be_copied(
    url: str, tmp_path: Path, version: int
) -> None:
    source = await opened(version, tmp_path)
    await source.close()
    files = FileFolder(tmp_path / "files")
    files.open()
    for name in ("file-a", "file-b"):
        writer = files.begin(name)
        writer.write(name.encode())
        writer.finish()
    values = BlobFiles(tmp_path / "blobs")
    values.open()
    value = values.keep(b"value")

    rows = await copy(tmp_path / "shoal.db", url)

    source = await opened(version, tmp_path)
    store = PostgresStore(url)
    await store.open()
    assert rows["jobs"] > 0
    assert rows["contents"] == 2
    with closing(ContentSessions(url)) as sessions:
        copied = ContentRows(sessions, FILES)
        assert copied.open() == {"file-a": 6, "file-b": 6}
        assert copied.read("file-b").read() == b"file-b"
        assert ContentRows(sessions, BLOBS).open() == {value.hex(): 5}
    assert await contents(store) == await contents(source)
    await store.append([submitted(1)], 1.0)  # numbers go on
    assert (await store.recent(JobFilter(), 1)).jobs[0].id == "j1"
    await store.close()
    await source.close()
    assert maintenance.check(url) == []
    with pytest.raises(StoreError, match="is not empty"):
        await copy(tmp_path / "shoal.db", url)


async def test_a_file_in_use_is_not_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "LOCK_ATTEMPTS", 1)
    with pytest.raises(StoreBroken, match="is missing"):
        await copy(tmp_path / "shoal.db", url)
    source = SqliteStore(tmp_path / "shoal.db")
    await source.open()

    with pytest.raises(StoreError, match="is in use"):
        await copy(tmp_path / "shoal.db", url)

    await source.close()
    with closing(sqlite3.connect(tmp_path / "shoal.db")) as sql:
        sql.execute("PRAGMA user_version = 3")
    with pytest.raises(StoreError, match="version 3, expected"):
        await copy(tmp_path / "shoal.db", url)


async def test_a_damaged_row_is_damage(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await store.append([WorkerMarked(WorkerId("w"), 1, "slow", JobId("j"))], 1.0)
    run_apart(url, "UPDATE facts SET body = '{'")

    with pytest.raises(StoreBroken, match="a row of the database is damaged"):
        await store.penalties_since(0.0)

    assert "damaged" in str(await store.wait_damaged())
    await store.close()


def test_contents_outlive_lost_sessions(url: str) -> None:
    migrated(url)
    sessions = ContentSessions(url)
    rows = ContentRows(sessions, FILES)
    writer = rows.begin("file-a")
    run_apart(url, END_OTHERS)

    writer.write(b"x" * PART_SIZE)
    run_apart(url, END_OTHERS)
    writer.write(b"y")
    writer.finish()

    with rows.read("file-a") as file:
        file.seek(PART_SIZE - 1)
        assert file.read() == b"xy"
    sessions.close()


def test_contents_of_a_lost_database_are_unavailable_for_now(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = ContentSessions("postgresql://127.0.0.1:1/lost")
    rows = ContentRows(sessions, FILES)

    with pytest.raises(StoreError, match="the database cannot be reached") as lost:
        rows.begin("file-a")
    rows.remove("file-a")

    assert lost.value.temporary
    assert "file-a could not be deleted" in caplog.text
    sessions.close()


def test_contents_that_are_deleted_meanwhile_are_an_error(url: str) -> None:
    migrated(url)
    with closing(ContentSessions(url)) as sessions:
        rows = ContentRows(sessions, FILES)
        writer = rows.begin("file-a")
        writer.write(b"x" * 2 * PART_SIZE)
        writer.finish()
        file = rows.read("file-a")
        file.read(PART_SIZE)

        rows.remove("file-a")

        with pytest.raises(StoreError, match="deleted while they were read"):
            file.read()


def migrated(url: str) -> None:
    session = Session(connect(url))
    with session.connection.transaction():
        migrate(session, create=True)
    session.close()
