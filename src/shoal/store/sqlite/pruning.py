"""Deletes what is old from the SQLite store, in short transactions.

Other transactions run between them, so nothing waits longer than for one of them.
"""

import math
import sqlite3
from functools import partial
from typing import NamedTuple

from shoal.domain.credentials import day_of
from shoal.domain.ids import JobId
from shoal.store.batches import BATCH_ID_LENGTH
from shoal.store.sqlite.database import Database
from shoal.store.sqlite.keys import add_up_usage, forget_ended, forget_expired
from shoal.store.sqlite.work_parts import WorkParts, disown_parts

# Of one transaction, which takes a few milliseconds.
JOBS_AT_ONCE = 50
FACTS_AT_ONCE = 500  # of workers
OWNERS_AT_ONCE = 200
PAGES_AT_ONCE = 200

FREE_SHARE = 0.25  # of the file's pages that are kept for new rows


MAY_GO = f"""idempotency_key IS NULL OR NOT EXISTS (
    SELECT 1 FROM batches
    WHERE ended_at IS NULL AND id = substr(idempotency_key, 1, {BATCH_ID_LENGTH}))"""
"""Of a job: it is not of an open batch, which may not have recorded its result yet."""


class SeenJob(NamedTuple):
    """A place among the jobs that have ended."""

    ended_at: float
    number: int


NO_JOB = SeenJob(-math.inf, 0)  # before the first


async def prune(database: Database, works: WorkParts, before: float) -> int:
    """Delete what ended before a Unix time; return the number of jobs."""
    await database.transact(lambda sql: _forget(sql, before))
    jobs = 0
    seen: SeenJob | None = NO_JOB
    while seen is not None:
        deleted, seen = await database.transact(
            partial(_delete_jobs, before=before, after=seen)
        )
        jobs += deleted
    await works.delete_unused()
    while await database.transact(lambda sql: _delete_facts(sql, before)):
        pass
    first: str | None = ""
    while first is not None:
        first = await database.transact(
            partial(add_up_usage, day=day_of(before), first=first, limit=OWNERS_AT_ONCE)
        )
    while await database.transact(_shrink):
        pass
    return jobs


def _forget(sql: sqlite3.Connection, before: float) -> None:
    forget_ended(sql, before)
    forget_expired(sql, before)
    sql.execute("DELETE FROM batches WHERE ended_at < ? AND NOT has_results", (before,))


def delete_job(sql: sqlite3.Connection, job_id: JobId) -> bool:
    """Delete a job that has ended and may go; return whether there was one."""
    query = f"SELECT id FROM jobs WHERE id = ? AND ended_at IS NOT NULL AND ({MAY_GO})"
    return _delete_with_traces(sql, sql.execute(query, (job_id,)).fetchall()) > 0


def _delete_jobs(
    sql: sqlite3.Connection, before: float, after: SeenJob
) -> tuple[int, SeenJob | None]:
    """Delete those that may go of some jobs, with their facts and deliveries.

    Returns the number of jobs deleted, and the last one seen; None: there are no more.
    """
    query = f"""SELECT id, ended_at, rowid, {MAY_GO}
                FROM jobs WHERE (ended_at, rowid) > (?, ?) AND ended_at < ?
                ORDER BY ended_at, rowid LIMIT ?"""
    rows = sql.execute(query, (*after, before, JOBS_AT_ONCE)).fetchall()
    jobs = [(job_id,) for job_id, _, _, may_go in rows if may_go]
    seen = SeenJob(*rows[-1][1:3]) if len(rows) == JOBS_AT_ONCE else None
    return _delete_with_traces(sql, jobs), seen


def _delete_with_traces(sql: sqlite3.Connection, jobs: list[tuple[str]]) -> int:
    disown_parts(sql, jobs)
    sql.executemany("DELETE FROM facts WHERE job_id = ?", jobs)
    sql.executemany("DELETE FROM webhook_deliveries WHERE job_id = ?", jobs)
    sql.executemany("DELETE FROM jobs WHERE id = ?", jobs)
    return len(jobs)


def _delete_facts(sql: sqlite3.Connection, before: float) -> int:
    """Delete some facts of workers; return their number."""
    query = """DELETE FROM facts WHERE number IN (
                   SELECT number FROM facts WHERE job_id IS NULL AND at < ? LIMIT ?)"""
    return sql.execute(query, (before, FACTS_AT_ONCE)).rowcount


def _shrink(sql: sqlite3.Connection) -> bool:
    """Give free pages back to the file system; return whether there may be more.

    A file that was made before it could shrink stays as large as it is.
    """
    ((free,),) = sql.execute("PRAGMA freelist_count")
    ((pages,),) = sql.execute("PRAGMA page_count")
    if free <= pages * FREE_SHARE:
        return False
    for _ in range(PAGES_AT_ONCE):
        # A larger number would free one page as well: Python's module takes one step
        # of a statement without columns.
        sql.execute("PRAGMA incremental_vacuum(1)")
    ((left,),) = sql.execute("PRAGMA freelist_count")
    return bool(left < free)
