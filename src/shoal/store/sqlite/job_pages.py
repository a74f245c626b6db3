"""Pages of jobs, the newest first, in the SQLite store.

A page is read from indexes whose entries are in its order, up to where it is full.
Conditions that no index fits are tested row by row, and few rows: a page may then be
short, or empty, and say where the next one begins.
"""

import heapq
import sqlite3
from collections.abc import Iterator
from itertools import islice
from typing import Any

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Priority
from shoal.domain.work import JobKind
from shoal.pool.lifecycle import JobState
from shoal.store import codec
from shoal.store.port import JobFilter, StoredJobPage, StoredJobSummary

ROWID_MAX = 2**63 - 1

SUMMARY = """id, kind, model, owner, priority, json_remove(terms, '$.form'), state,
             lease, submitted_at, ended_at, error"""


def read_summary(sql: sqlite3.Connection, job_id: JobId) -> StoredJobSummary | None:
    row = sql.execute(f"SELECT {SUMMARY} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    return None if row is None else _summary(row)


def read_page(
    sql: sqlite3.Connection, wanted: JobFilter, limit: int, examined_max: int
) -> StoredJobPage:
    """Read a page after testing at most ``examined_max`` jobs, or ``limit``."""
    examined_max = max(examined_max, limit)
    before = ROWID_MAX
    if wanted.before is not None:
        query = "SELECT rowid FROM jobs WHERE id = ?"
        row = sql.execute(query, (wanted.before,)).fetchone()
        if row is None:
            return StoredJobPage([], None)
        (before,) = row
    states = {state.value for state in wanted.states}
    found: list[StoredJobSummary] = []
    last, examined = None, 0
    for _, user, *row in islice(_candidates(sql, wanted, before), examined_max):
        last, kind, state = JobId(row[0]), row[1], row[6]
        examined += 1
        if (
            (wanted.user is None or user == wanted.user)
            and (wanted.kind is None or kind == wanted.kind.value)
            and (not states or state in states)
        ):
            found.append(_summary(row))
            if len(found) == limit:
                break
    is_last = len(found) < limit and examined < examined_max
    return StoredJobPage(found, None if is_last else last)


def _candidates(
    sql: sqlite3.Connection, wanted: JobFilter, before: int
) -> Iterator[Any]:
    """Yield rows from the indexes that fit a filter best, the newest first."""
    states = [state.value for state in wanted.states or JobState]
    ranges: list[tuple[str, tuple[object, ...]]]
    if wanted.owner is not None and wanted.user:
        # The index has the jobs with a user only.
        where = "owner = ? AND user = ? AND user <> '' AND"
        ranges = [(where, (wanted.owner, wanted.user))]
    elif wanted.owner is not None:
        ranges = [("owner = ? AND state = ? AND", (wanted.owner, s)) for s in states]
    elif wanted.states:
        ranges = [("state = ? AND", (state,)) for state in states]
    else:
        ranges = [("", ())]
    query = "SELECT rowid, user, {} FROM jobs WHERE {} rowid < ? ORDER BY rowid DESC"
    rows = (
        sql.execute(query.format(SUMMARY, where), (*values, before))
        for where, values in ranges
    )
    return heapq.merge(*rows, key=lambda row: row[0], reverse=True)


def _summary(row: Any) -> StoredJobSummary:
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
