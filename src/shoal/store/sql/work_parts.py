"""The parts of large works, which are written before their jobs are submitted.

All that arrives waits for the commit that accepts a job, so the parts are written in
transactions of their own, and others pass between them.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Call, CallStream, JsonWork
from shoal.store import codec
from shoal.store.sql.database import Database, Sql

WRITTEN_AT_ONCE = codec.PART_SIZE  # bytes of one transaction
DELETED_AT_ONCE = 16  # parts of one transaction
JOBS_AT_ONCE = 100  # whose parts a prune deletes before it looks for more

INSERT_PART = "INSERT INTO work_parts (job_id, part, data) VALUES (?, ?, ?)"


class WorkParts:
    """Writes works before their jobs, and deletes those that no job claims.

    ``submit`` runs in the thread that writes, all else in the event loop.
    """

    def __init__(self, database: Database[Any]) -> None:
        self._database = database
        # One part is written at a time, of the jobs in turn.
        self._turn = asyncio.Lock()
        self._deletion = asyncio.Lock()  # who has it looks for unused parts
        # Data for the rows of jobs, from their preparation until they are stored;
        # None: nothing, or their parts are not written yet.
        self._rows: dict[JobId, bytes | None] = {}

    async def prepare(self, job: Job) -> None:
        """Write the parts of a large work.  Raises StoreError."""
        if not self._deletion.locked():
            # No more than this job might leave: a prune leaves thousands to itself.
            await self._delete_unused_of(jobs=1)
        self._rows[job.id] = None
        try:
            split = await asyncio.to_thread(codec.split_work, _storable(job), job.terms)
            for first, parts in _slices(split.parts):
                write = partial(_write_ahead, job_id=job.id, first=first, parts=parts)
                async with self._turn:
                    await self._database.transact(write)
        except BaseException:  # cancelled as well
            self.discard(job.id)
            raise
        self._rows[job.id] = split.row

    def discard(self, job_id: JobId) -> None:
        """Let the parts of a job be deleted that is not submitted."""
        self._rows.pop(job_id, None)

    async def delete_unused(self) -> None:
        """Delete the parts that no job claims.  Raises StoreError.

        They are of jobs that were not submitted, also before a restart, or deleted.
        """
        while await self._delete_unused_of(JOBS_AT_ONCE):
            pass

    async def delete(self, job_id: JobId) -> None:
        """Delete the parts of a job that was deleted.  Raises StoreError."""
        delete = partial(_delete_unclaimed, job_id=job_id)
        while await self._database.transact(delete):
            pass

    async def _delete_unused_of(self, jobs: int) -> int:
        """Delete the parts of at most ``jobs`` jobs; return the number of jobs."""
        async with self._deletion:
            # Jobs that are being submitted are among the unclaimed ones.
            limit = jobs + len(self._rows)
            query = "SELECT job_id FROM unclaimed_works LIMIT ?"
            unclaimed = await self._database.read(
                lambda sql: [JobId(each) for (each,) in sql.execute(query, (limit,))]
            )
            unused = [each for each in unclaimed if each not in self._rows][:jobs]
            for job_id in unused:
                await self.delete(job_id)
            return len(unused)

    def submit(self, sql: Sql, job: Job) -> bytes | None:
        """Return what goes to the row of a job, in the transaction that submits it."""
        row = self._rows.get(job.id)
        if row is None:
            split = codec.split_work(_storable(job), job.terms)
            _write(sql, job.id, 0, split.parts)
            return split.row
        if codec.head_of(row) is not None:
            sql.execute("DELETE FROM unclaimed_works WHERE job_id = ?", (job.id,))
        return row

    def forget(self, job_id: JobId) -> None:
        """Forget a job that is stored."""
        self._rows.pop(job_id, None)


def read_work(sql: Sql, job_id: JobId, stored: bytes | None) -> bytes | None:
    """Return the work of a job, whose row has ``stored``.  Raises StoreError."""
    head = codec.head_of(stored)
    if head is None:
        return stored
    query = "SELECT data FROM work_parts WHERE job_id = ? ORDER BY part"
    return codec.join_parts(head, (data for (data,) in sql.execute(query, (job_id,))))


def disown_parts(sql: Sql, job_ids: Iterable[tuple[str]]) -> None:
    """Let the parts of jobs be deleted later, in the transaction that deletes them."""
    query = """INSERT INTO unclaimed_works
               SELECT job_id FROM work_parts WHERE job_id = ? AND part = 0"""
    sql.executemany(query, job_ids)


def _storable(job: Job) -> JsonWork | None:
    """Return the work that is stored as JSON; None: a call, which is stored apart."""
    if isinstance(job.work, Call):
        return None
    assert not isinstance(job.work, CallStream), "call streams are not stored"
    return job.work


def _slices(parts: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Yield the number of the first part of each transaction, and its parts."""
    first, size = 0, 0
    for number, part in enumerate(parts):
        if size + len(part) > WRITTEN_AT_ONCE and number > first:
            yield first, parts[first:number]
            first, size = number, 0
        size += len(part)
    if first < len(parts):
        yield first, parts[first:]


def _write_ahead(sql: Sql, job_id: JobId, first: int, parts: Sequence[bytes]) -> None:
    if first == 0:
        sql.execute("INSERT INTO unclaimed_works VALUES (?)", (job_id,))
    _write(sql, job_id, first, parts)


def _write(sql: Sql, job_id: JobId, first: int, parts: Sequence[bytes]) -> None:
    rows = enumerate(parts, start=first)
    sql.executemany(INSERT_PART, [(job_id, number, data) for number, data in rows])


def _delete_unclaimed(sql: Sql, job_id: JobId) -> bool:
    """Delete some parts that no job claims; return whether there may be more.

    The job may have been submitted since it was found to be unclaimed.
    """
    query = """DELETE FROM work_parts WHERE number IN (
                   SELECT number FROM work_parts WHERE job_id IN (
                       SELECT job_id FROM unclaimed_works WHERE job_id = ?) LIMIT ?)"""
    if sql.execute(query, (job_id, DELETED_AT_ONCE)).rowcount == DELETED_AT_ONCE:
        return True
    sql.execute("DELETE FROM unclaimed_works WHERE job_id = ?", (job_id,))
    return False
