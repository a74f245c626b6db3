"""The store in one SQLite file: a writer thread, one commit for each batch."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Job
from shoal.pool.lifecycle import TRANSITIONS, JobState
from shoal.store import codec
from shoal.store.port import Recorded, StoredJob
from shoal.store.schema import migrate

T = TypeVar("T")

LOCK_TIMEOUT = 5.0  # seconds to wait for a coordinator that is just stopping

STATE_AFTER = {
    fact: state.value for facts in TRANSITIONS.values() for fact, state in facts.items()
}

JOB = """SELECT id, owner, state, work, limits, lease, outcome, error,
                submitted_at, ended_at FROM jobs"""


class SqliteStore:
    """Keeps everything in one file, which one process at a time may use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-store")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, or make it, and bring it to the present version.

        Raises StoreError if it is in use, damaged, or from a newer Shoal.
        """
        await self._run(self._open)

    async def append(self, facts: Sequence[Fact], at: float) -> None:
        await self._run(lambda: self._append(facts, at))

    async def open_jobs(self) -> list[StoredJob]:
        query = f"{JOB} WHERE ended_at IS NULL ORDER BY submitted_at, rowid"
        return await self._run(lambda: [_job(row) for row in self._sql(query)])

    async def job(self, job_id: JobId) -> StoredJob | None:
        def read() -> StoredJob | None:
            row = self._sql(f"{JOB} WHERE id = ?", job_id).fetchone()
            return None if row is None else _job(row)

        return await self._run(read)

    async def story(self, job_id: JobId) -> list[Recorded]:
        def read() -> list[Recorded]:
            row = self._sql(f"{JOB} WHERE id = ?", job_id).fetchone()
            if row is None:
                return []
            stored = _job(row)
            query = "SELECT at, type, body FROM facts WHERE job_id = ? ORDER BY number"
            return [
                Recorded(at, codec.decode_fact(name, body, stored.job, stored.outcome))
                for at, name, body in self._sql(query, job_id)
            ]

        return await self._run(read)

    async def models(self, since: float) -> set[str]:
        query = """SELECT DISTINCT model.value
                   FROM facts, json_each(facts.body, '$.offer.models') AS model
                   WHERE job_id IS NULL AND at >= ? AND facts.type = 'WorkerJoined'"""
        return await self._run(lambda: {name for (name,) in self._sql(query, since)})

    async def prune(self, before: float) -> int:
        return await self._run(lambda: self._prune(before))

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

    # From here on: in the writer thread.

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
        if self._database is None:
            raise StoreError(f"{self._path} is not open")
        return self._database.execute(query, values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write what the block writes all or not at all."""
        self._sql("BEGIN IMMEDIATE")
        try:
            yield
            self._sql("COMMIT")
        except BaseException:
            # Some errors, as of a full disk, have ended the transaction already.
            if self._database is not None and self._database.in_transaction:
                self._sql("ROLLBACK")
            raise

    def _append(self, facts: Sequence[Fact], at: float) -> None:
        with self._transaction():
            for fact in facts:
                self._write(fact, at)

    def _write(self, fact: Fact, at: float) -> None:
        match fact:
            case WorkerJoined() | WorkerDraining() | WorkerLost():
                self._record(fact, None, at)
                return
            case CameLate(job_id=job_id):
                if not self._sql("SELECT 1 FROM jobs WHERE id = ?", job_id).fetchone():
                    return  # pruned: nobody could ask for its story
            case JobSubmitted(job):
                self._sql(
                    "INSERT INTO jobs (id, kind, model, owner, state, work, limits,"
                    " submitted_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    job.id,
                    job.kind.value,
                    job.model,
                    job.owner,
                    JobState.QUEUED.value,
                    codec.encode_work(job.work),
                    codec.encode_limits(job.limits),
                    at,
                )
            case JobLeased(job_id=job_id, lease=lease):
                self._update(fact, job_id, "lease = ?", lease)
            case JobStarted(job_id=job_id) | JobRequeued(job_id=job_id):
                self._update(fact, job_id)
            case JobCompleted(job_id, _, outcome):
                encoded = codec.encode_outcome(outcome)
                self._update(fact, job_id, "outcome = ?, ended_at = ?", encoded, at)
            case JobFailed(job_id=job_id, error=error):
                self._update(fact, job_id, "error = ?, ended_at = ?", error, at)
            case JobExpired(job_id=job_id, error=error):
                self._update(fact, job_id, "error = ?, ended_at = ?", error, at)
            case JobCancelled(job_id, reason):
                self._update(fact, job_id, "error = ?, ended_at = ?", reason, at)
        self._record(fact, fact.job_id, at)

    def _update(
        self, fact: Fact, job_id: JobId, columns: str = "", *values: object
    ) -> None:
        columns = f"state = ?, {columns}" if columns else "state = ?"
        state = STATE_AFTER[type(fact)]  # type: ignore[index]  # only job facts come here
        query = f"UPDATE jobs SET {columns} WHERE id = ?"
        if not self._sql(query, state, *values, job_id).rowcount:
            raise StoreError(f"{self._path}: there is no job {job_id}")

    def _record(self, fact: Fact, job_id: JobId | None, at: float) -> None:
        self._sql(
            "INSERT INTO facts (at, type, job_id, body) VALUES (?, ?, ?, ?)",
            at,
            type(fact).__name__,
            job_id,
            codec.encode_fact(fact),
        )

    def _prune(self, before: float) -> int:
        with self._transaction():
            old = "SELECT id FROM jobs WHERE ended_at < ?"
            self._sql(f"DELETE FROM facts WHERE job_id IN ({old})", before)
            self._sql("DELETE FROM facts WHERE job_id IS NULL AND at < ?", before)
            return self._sql("DELETE FROM jobs WHERE ended_at < ?", before).rowcount


def _job(row: tuple[str, str, str, str, str, int, str, str, float, float]) -> StoredJob:
    (id_, owner, state, work, limits, lease, outcome, error, submitted_at, ended) = row
    return StoredJob(
        Job(JobId(id_), codec.decode_work(work), codec.decode_limits(limits), owner),
        JobState(state),
        LeaseNumber(lease),
        submitted_at,
        ended,
        codec.decode_outcome(outcome) if outcome else None,
        error,
    )
