"""The facts about a job: in its row, and from some length on in rows of their own.

Most jobs have a few facts, which a compressed row holds in a tenth of the space of rows
of their own.  Appending rewrites the row, so only so many are appended.  Jobs that
earlier versions wrote have rows of their own for all.
"""

import sqlite3
from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import StoreError
from shoal.domain.facts import FACT_NAMES
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from shoal.store import codec
from shoal.store.packing import pack, unpack
from shoal.store.port import RecordedFact

HISTORY_MAX = 4 << 10  # bytes in a job's row from which on nothing is appended

FactRow: TypeAlias = tuple[float, str, JobId | None, str]

INSERT_FACT = "INSERT INTO facts (at, type, job_id, body) VALUES (?, ?, ?, ?)"


def begin_history(recorded: Sequence[RecordedFact], *, ended: bool) -> bytes:
    """Return the history of a new job for its row.  Only what stays is compressed."""
    lines = codec.encode_history(recorded)
    return pack(lines) if ended else lines


def extend_history(
    sql: sqlite3.Connection,
    job_id: JobId,
    recorded: Sequence[RecordedFact],
    *,
    ending: bool,
) -> bytes | None:
    """Return the history of a stored job for its row; None: the row is complete.

    Writes the facts that do not go there.  Raises StoreError if there is no such job.
    """
    query = "SELECT packed_history, ended_at FROM jobs WHERE id = ?"
    row = sql.execute(query, (job_id,)).fetchone()
    if row is None:
        raise StoreError(f"there is no job {job_id}")
    packed, ended_at = row
    lines = None if packed is None else unpack(packed)
    if lines is None or len(lines) >= HISTORY_MAX:
        sql.executemany(INSERT_FACT, [fact_row(each, job_id) for each in recorded])
    else:
        lines += codec.encode_history(recorded)
    if lines is None:
        return None
    return pack(lines) if ending or ended_at is not None else lines


def fact_row(recorded: RecordedFact, job_id: JobId | None) -> FactRow:
    """Return the row of its own of a fact."""
    fact = recorded.fact
    return recorded.at, FACT_NAMES[type(fact)], job_id, codec.encode_fact(fact)


def read_history(
    sql: sqlite3.Connection, job: Job, outcome: Outcome | None
) -> list[RecordedFact]:
    """Read the facts about a job, in order."""
    query = "SELECT packed_history FROM jobs WHERE id = ?"
    (packed,) = sql.execute(query, (job.id,)).fetchone() or (None,)
    found = codec.decode_history(unpack(packed or b""), job, outcome)
    query = "SELECT at, type, body FROM facts WHERE job_id = ? ORDER BY number"
    return found + [
        RecordedFact(at, codec.decode_fact(name, body, job, outcome))
        for at, name, body in sql.execute(query, (job.id,))
    ]
