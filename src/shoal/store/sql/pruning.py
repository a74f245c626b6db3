"""Deletes what is old from the store, in short transactions.

Other transactions run between them, so nothing waits longer than for one of them.
"""

import math
from functools import partial
from typing import Any, NamedTuple

from shoal.domain.credentials import day_of
from shoal.domain.ids import JobId
from shoal.store.batches import BATCH_ID_LENGTH
from shoal.store.sql.database import Database, Sql
from shoal.store.sql.keys import (
    add_up_usage,
    forget_ended,
    forget_expired,
    forget_sign_ins,
)
from shoal.store.sql.work_parts import WorkParts, disown_parts

# Of one transaction, which takes a few milliseconds.
JOBS_AT_ONCE = 50
FACTS_AT_ONCE = 500  # of workers
OWNERS_AT_ONCE = 200


MAY_GO = f"""idempotency_key IS NULL OR NOT EXISTS (
    SELECT 1 FROM batches
    WHERE ended_at IS NULL AND id = substr(idempotency_key, 1, {BATCH_ID_LENGTH}))"""
"""Of a job: it is not of an open batch, which may not have recorded its result yet."""


class SeenJob(NamedTuple):
    """A place among the jobs that have ended."""

    ended_at: float
    number: int


NO_JOB = SeenJob(-math.inf, 0)  # before the first


async def prune(database: Database[Any], works: WorkParts, before: float) -> int:
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
    await database.give_back()
    return jobs


def _forget(sql: Sql, before: float) -> None:
    forget_ended(sql, before)
    forget_expired(sql, before)
    forget_sign_ins(sql, before)
    sql.execute("DELETE FROM batches WHERE ended_at < ? AND NOT has_results", (before,))


def delete_job(sql: Sql, job_id: JobId) -> bool:
    """Delete a job that has ended and may go; return whether there was one."""
    query = f"SELECT id FROM jobs WHERE id = ? AND ended_at IS NOT NULL AND ({MAY_GO})"
    return _delete_with_traces(sql, sql.execute(query, (job_id,)).fetchall()) > 0


def _delete_jobs(sql: Sql, before: float, after: SeenJob) -> tuple[int, SeenJob | None]:
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


def _delete_with_traces(sql: Sql, jobs: list[tuple[str]]) -> int:
    disown_parts(sql, jobs)
    sql.executemany("DELETE FROM facts WHERE job_id = ?", jobs)
    sql.executemany("DELETE FROM webhook_deliveries WHERE job_id = ?", jobs)
    sql.executemany("DELETE FROM jobs WHERE id = ?", jobs)
    return len(jobs)


def _delete_facts(sql: Sql, before: float) -> int:
    """Delete some facts of workers; return their number."""
    query = """DELETE FROM facts WHERE number IN (
                   SELECT number FROM facts WHERE job_id IS NULL AND at < ? LIMIT ?)"""
    return sql.execute(query, (before, FACTS_AT_ONCE)).rowcount
