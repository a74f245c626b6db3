"""Calls of webhooks in the SQLite store."""

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.work import Webhook
from shoal.store.calls import Call, Tried
from shoal.store.sqlite_keys import Database

CALL = "SELECT job_id, url, secret, attempts, due_at, error FROM calls"


class SqliteCalls:
    """Reads what ``write_calls`` has written beside the jobs, and notes attempts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def due(
        self,
        at: float,
        limit: int,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> Sequence[Tried]:
        query = (
            f"{CALL} WHERE due_at <= ? AND job_id NOT IN ({_marks(without)})"
            f" AND host NOT IN ({_marks(hosts_without)}) ORDER BY due_at LIMIT ?"
        )
        values = (at, *without, *hosts_without, limit)
        return await self._database.transact(
            lambda sql: [_tried(row) for row in sql.execute(query, values)]
        )

    async def next_due(
        self,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> float | None:
        query = (
            "SELECT min(due_at) FROM calls WHERE due_at IS NOT NULL"
            f" AND job_id NOT IN ({_marks(without)})"
            f" AND host NOT IN ({_marks(hosts_without)})"
        )
        values = (*without, *hosts_without)

        def next_due(sql: sqlite3.Connection) -> float | None:
            ((first,),) = sql.execute(query, values)
            return first  # type: ignore[no-any-return]  # the schema says it is REAL

        return await self._database.transact(next_due)

    async def tried(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        query = (
            "UPDATE calls SET attempts = attempts + 1, error = ?1, due_at = ?2,"
            " secret = iif(?2 IS NULL, '', secret) WHERE job_id = ?3"
        )
        values = (error, due_at, job_id)
        await self._database.transact(lambda sql: sql.execute(query, values))

    async def of(self, job_id: JobId) -> Tried | None:
        def of(sql: sqlite3.Connection) -> Tried | None:
            row = sql.execute(f"{CALL} WHERE job_id = ?", (job_id,)).fetchone()
            return None if row is None else _tried(row)

        return await self._database.transact(of)


def write_calls(sql: sqlite3.Connection, calls: Sequence[Call], at: float) -> None:
    """Write that webhooks are to be called, in the caller's transaction."""
    sql.executemany(
        "INSERT INTO calls (job_id, url, secret, host, due_at) VALUES (?, ?, ?, ?, ?)",
        [
            (call.job_id, call.webhook.url, call.webhook.secret, call.host, at)
            for call in calls
        ],
    )


def _tried(row: tuple[Any, ...]) -> Tried:
    job_id, url, secret, attempts, due_at, error = row
    return Tried(Call(JobId(job_id), Webhook(url, secret)), attempts, due_at, error)


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
