"""What facts change in the tables of the SQLite store."""

import sqlite3
from collections.abc import Iterable
from typing import TypeAlias

from shoal.domain.errors import StoreError
from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    ReceiptPresented,
    WorkerConditioned,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId
from shoal.domain.work import Job
from shoal.pool.lifecycle import TRANSITIONS, JobState
from shoal.store import codec
from shoal.store.port import Recorded
from shoal.store.sqlite_keys import count_usage
from shoal.store.sqlite_ledger import write_limit

FactRow: TypeAlias = tuple[float, str, JobId | None, str]

STATE_AFTER = {
    fact: state.value for facts in TRANSITIONS.values() for fact, state in facts.items()
}


def write_facts(sql: sqlite3.Connection, recorded: Iterable[Recorded]) -> None:
    """Write what facts change, and the facts, in the transaction that is open.

    Raises StoreError for a fact about a job that there is not.
    """
    rows = [_write(sql, each.fact, each.at) for each in recorded]
    sql.executemany(
        "INSERT INTO facts (at, type, job_id, body) VALUES (?, ?, ?, ?)",
        [row for row in rows if row is not None],
    )


def _write(sql: sqlite3.Connection, fact: Fact, at: float) -> FactRow | None:
    """Write what a fact changes; return its own row, if it is worth one."""
    match fact:
        case WorkerTrusted(owner, user, public_key):
            query = "INSERT OR IGNORE INTO trusted VALUES (?, ?, ?, ?)"
            sql.execute(query, (owner, user, public_key, at))
            return _row(fact, None, at)
        case AccountLimited():
            write_limit(sql, fact)
            return _row(fact, None, at)
        case (
            WorkerJoined()
            | WorkerDraining()
            | WorkerLost()
            | WorkerMarked()
            | AccountCredited()
        ):
            return _row(fact, None, at)
        case WorkerConditioned():
            return None  # of no use later
        case CameLate(job_id=job_id) | ReceiptPresented(job_id=job_id):
            known = sql.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,))
            if not known.fetchone():
                return None  # pruned: nobody could ask for its story
        case JobSubmitted(job):
            _submit(sql, job, at)
        case JobLeased(job_id, _, lease) | JobHedged(job_id, _, lease):
            _update(sql, fact, job_id, "lease = ?", lease)
        case JobStarted() | JobRequeued() | JobUnhedged():
            _update(sql, fact, fact.job_id)
        case JobCompleted(job_id, _, outcome):
            encoded = codec.encode_outcome(outcome)
            _update(sql, fact, job_id, "outcome = ?, ended_at = ?", encoded, at)
            count_usage(sql, job_id, outcome, at)
        case JobFailed(job_id=job_id, error=error):
            _update(sql, fact, job_id, "error = ?, ended_at = ?", error, at)
        case JobExpired(job_id, _, error, written):
            _update(sql, fact, job_id, "error = ?, ended_at = ?", error, at)
            count_usage(sql, job_id, written, at)
        case JobCancelled(job_id, reason, written):
            _update(sql, fact, job_id, "error = ?, ended_at = ?", reason, at)
            count_usage(sql, job_id, written, at)
    return _row(fact, fact.job_id, at)


def _submit(sql: sqlite3.Connection, job: Job, at: float) -> None:
    name = job.idempotency_key or None
    if name is not None:
        # It is taken from a job that came to nothing: the hub asked before.
        sql.execute(
            "UPDATE jobs SET idempotency_key = NULL"
            " WHERE owner = ? AND idempotency_key = ?",
            (job.owner, name),
        )
    sql.execute(
        "INSERT INTO jobs (id, kind, model, owner, state, work, limits, priority,"
        " idempotency_key, terms, user, submitted_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            job.id,
            job.kind.value,
            job.model,
            job.owner,
            JobState.QUEUED.value,
            codec.encode_work(job.work),
            codec.encode_limits(job.limits),
            job.priority.value,
            name,
            codec.encode_terms(job.terms),
            job.terms.user,
            at,
        ),
    )


def _update(
    sql: sqlite3.Connection,
    fact: Fact,
    job_id: JobId,
    columns: str = "",
    *values: object,
) -> None:
    columns = f"state = ?, {columns}" if columns else "state = ?"
    state = STATE_AFTER[type(fact)]  # type: ignore[index]  # only job facts come here
    query = f"UPDATE jobs SET {columns} WHERE id = ?"
    if not sql.execute(query, (state, *values, job_id)).rowcount:
        raise StoreError(f"there is no job {job_id}")


def _row(fact: Fact, job_id: JobId | None, at: float) -> FactRow:
    return at, type(fact).__name__, job_id, codec.encode_fact(fact)
