"""The store in one SQLite file: a writer thread, one commit for each batch."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    Fact,
    WorkerSuspended,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, Priority
from shoal.domain.work import JobKind
from shoal.domain.worker import Suspension
from shoal.pool.lifecycle import JobState
from shoal.store import codec
from shoal.store.blobs import BlobStore, MemoryBlobs
from shoal.store.ledger import NO_ENTRIES, LedgerEntries
from shoal.store.port import (
    OMITTED_WORK,
    JobFilter,
    RecordedFact,
    StoredJob,
    StoredJobSummary,
)
from shoal.store.sqlite.facts import LargeValues, write_facts
from shoal.store.sqlite.keys import SqliteKeys, forget_ended
from shoal.store.sqlite.ledger import SqliteLedger, write_entries
from shoal.store.sqlite.pairing import SqlitePairing, forget_expired
from shoal.store.sqlite.schema import migrate
from shoal.store.sqlite.webhooks import SqliteWebhooks, write_deliveries

T = TypeVar("T")

LOCK_TIMEOUT = 5.0  # seconds to wait for a coordinator that is just stopping


JOB = """SELECT id, kind, owner, state, work, limits, priority, idempotency_key, terms,
                lease, outcome, error, submitted_at, ended_at,
                function_call, value
         FROM jobs"""


SUMMARY = """SELECT id, kind, model, owner, priority, json_remove(terms, '$.form'),
                    state, lease, submitted_at, ended_at, error FROM jobs"""


class SqliteStore:
    """Stores everything in one file, which one process at a time may use."""

    def __init__(self, path: Path, blobs: BlobStore | None = None) -> None:
        """Name the file; values too large for a row go to ``blobs``."""
        self.keys = SqliteKeys(self)
        self.ledger = SqliteLedger(self)
        self.webhooks = SqliteWebhooks(self)
        self.pairing = SqlitePairing(self)
        self._path = path
        self._large_values = LargeValues(blobs or MemoryBlobs())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-store")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._run(self._open)

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
    ) -> None:
        await self._run(lambda: self._append(facts, at, earlier, entries))

    async def open_jobs(self) -> list[StoredJob]:
        query = f"{JOB} WHERE ended_at IS NULL ORDER BY submitted_at, rowid"
        return await self._run(
            lambda: [self._open_job(row) for row in self._sql(query)]
        )

    async def job(self, job_id: JobId) -> StoredJob | None:
        def read() -> StoredJob | None:
            row = self._sql(f"{JOB} WHERE id = ?", job_id).fetchone()
            return None if row is None else self._job(row)

        return await self._run(read)

    async def summary(self, job_id: JobId) -> StoredJobSummary | None:
        def read() -> StoredJobSummary | None:
            row = self._sql(f"{SUMMARY} WHERE id = ?", job_id).fetchone()
            return None if row is None else _summary(row)

        return await self._run(read)

    async def recent(self, wanted: JobFilter, limit: int) -> list[StoredJobSummary]:
        asked = {
            "owner = ?": wanted.owner,
            "user = ?": wanted.user,
            "kind = ?": wanted.kind and wanted.kind.value,
            "rowid < (SELECT rowid FROM jobs WHERE id = ?)": wanted.before,
        }
        given = {test: value for test, value in asked.items() if value is not None}
        if wanted.states:
            states = json.dumps([state.value for state in wanted.states])
            given["state IN (SELECT value FROM json_each(?))"] = states
        where = " AND ".join(given) or "TRUE"
        query = f"{SUMMARY} WHERE {where} ORDER BY rowid DESC LIMIT ?"
        values = (*given.values(), limit)
        return await self._run(
            lambda: [_summary(row) for row in self._sql(query, *values)]
        )

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> StoredJob | None:
        def read() -> StoredJob | None:
            query = f"{JOB} WHERE owner = ? AND idempotency_key = ?"
            row = self._sql(query, owner, idempotency_key).fetchone()
            return None if row is None else self._job(row)

        return await self._run(read)

    async def history(self, job_id: JobId) -> list[RecordedFact]:
        def read() -> list[RecordedFact]:
            row = self._sql(f"{JOB} WHERE id = ?", job_id).fetchone()
            if row is None:
                return []
            stored = self._job(row)
            query = "SELECT at, type, body FROM facts WHERE job_id = ? ORDER BY number"
            return [
                RecordedFact(
                    at, codec.decode_fact(name, body, stored.job, stored.outcome)
                )
                for at, name, body in self._sql(query, job_id)
            ]

        return await self._run(read)

    async def history_since(self, job_id: JobId, after: int) -> list[RecordedFact]:
        query = """SELECT at, type, body FROM facts WHERE job_id = ?
                   ORDER BY number LIMIT -1 OFFSET ?"""
        job = Job(job_id, OMITTED_WORK)
        return await self._run(
            lambda: [
                RecordedFact(at, codec.decode_fact(name, body, job, None))
                for at, name, body in self._sql(query, job_id, after)
            ]
        )

    async def trusted_workers(self) -> list[WorkerTrusted]:
        query = "SELECT owner, user, public_key FROM trusted ORDER BY paired_at"
        return await self._run(
            lambda: [WorkerTrusted(*row) for row in self._sql(query)]
        )

    async def suspensions(self) -> list[tuple[WorkerSuspended, float]]:
        query = "SELECT name, how, by, at FROM suspensions ORDER BY at, name"
        return await self._run(
            lambda: [
                (WorkerSuspended(name, Suspension(how), by), at)
                for name, how, by, at in self._sql(query)
            ]
        )

    async def penalties_since(self, since: float) -> list[RecordedFact]:
        query = """SELECT at, body FROM facts
                   WHERE job_id IS NULL AND at >= ? AND type = 'WorkerMarked'
                   ORDER BY number"""

        def read() -> list[RecordedFact]:
            rows = self._sql(query, since)
            return [RecordedFact(at, codec.decode_marked(body)) for at, body in rows]

        return await self._run(read)

    async def models_since(self, since: float) -> set[str]:
        query = """SELECT DISTINCT model.value
                   FROM facts, json_each(facts.body, '$.offer.models') AS model
                   WHERE job_id IS NULL AND at >= ? AND facts.type = 'WorkerJoined'"""
        return await self._run(lambda: {name for (name,) in self._sql(query, since)})

    async def prune(self, before: float) -> int:
        return await self._run(lambda: self._prune(before))

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in the writer thread, in one transaction.

        Raises StoreError.
        """

        def run() -> T:
            with self._transaction() as database:
                return work(database)

        return await self._run(run)

    async def close(self) -> None:
        def close() -> None:
            if self._database is not None:
                self._database.close()
                self._database = None

        await self._run(close)
        self._thread.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    # The methods below run in the writer thread.

    def _open(self) -> None:
        database = sqlite3.connect(
            self._path,
            timeout=LOCK_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # Exclusive: a second coordinator on the same file would hand out the same
            # jobs again.
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            # "Accepted" means on disk, so each commit waits for the disk.
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            database.execute("COMMIT")
            migrate(database)
        except sqlite3.OperationalError as error:
            database.close()
            if "locked" in str(error):
                raise StoreError(
                    f"{self._path} is in use: stop the other `shoal serve`, or give "
                    "this one another --data-dir"
                ) from error
            raise
        except BaseException:
            database.close()
            raise
        self._database = database

    def _sql(self, query: str, *values: object) -> sqlite3.Cursor:
        return self._opened.execute(query, values)

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(f"{self._path} is not open")
        return self._database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction."""
        database = self._opened
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
            database.execute("COMMIT")
        except BaseException:
            # Some errors, as of a full disk, have ended the transaction already.
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact],
        entries: LedgerEntries,
    ) -> None:
        with self._transaction() as database:
            recorded = [*earlier, *(RecordedFact(at, fact) for fact in facts)]
            write_facts(database, recorded, self._large_values)
            write_entries(database, entries, at)
            write_deliveries(database, entries.deliveries, at)

    def _job(self, row: tuple[Any, ...]) -> StoredJob:
        return _job(row, self._large_values.blobs)

    def _open_job(self, row: tuple[Any, ...]) -> StoredJob:
        """Read an open job, and pin its large values until it ends."""
        stored, (call, _) = self._job(row), row[-2:]
        if call is not None:
            self._large_values.pin(stored.job.id, codec.large_values_of(call))
        return stored

    def _prune(self, before: float) -> int:
        with self._transaction():
            old = "SELECT id FROM jobs WHERE ended_at < ?"
            self._sql(f"DELETE FROM facts WHERE job_id IN ({old})", before)
            self._sql(f"DELETE FROM webhook_deliveries WHERE job_id IN ({old})", before)
            self._sql("DELETE FROM facts WHERE job_id IS NULL AND at < ?", before)
            forget_ended(self._opened, before)
            forget_expired(self._opened, before)
            return self._sql("DELETE FROM jobs WHERE ended_at < ?", before).rowcount


def _summary(row: tuple[Any, ...]) -> StoredJobSummary:
    id_, kind, model, owner, priority, terms, state, lease, *rest = row
    return StoredJobSummary(
        JobId(id_),
        JobKind(kind),
        model,
        owner,
        Priority(priority),
        codec.decode_terms(terms),
        JobState(state),
        LeaseNumber(lease),
        *rest,
    )


def _job(row: tuple[Any, ...], blobs: BlobStore) -> StoredJob:
    id_, kind, owner, state, work, limits, priority, name, terms, *rest = row
    lease, outcome, error, submitted_at, ended_at, call, value = rest
    return StoredJob(
        Job(
            JobId(id_),
            codec.decode_call(call, blobs) if call else codec.decode_work(kind, work),
            codec.decode_limits(limits),
            owner,
            Priority(priority),
            idempotency_key=name or "",
            terms=codec.decode_terms(terms),
        ),
        JobState(state),
        LeaseNumber(lease),
        submitted_at,
        ended_at,
        codec.decode_outcome(outcome, value) if outcome else None,
        error,
    )
