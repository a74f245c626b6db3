"""Webhook deliveries in the SQLite store."""

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.store.sqlite.database import SqlRunner
from shoal.store.webhooks import DeliveryState, WebhookDelivery

DELIVERY = """SELECT job_id, url, secret, attempts, due_at, error
              FROM webhook_deliveries"""


class SqliteWebhooks:
    """Reads what ``write_deliveries`` wrote beside the jobs, and records attempts."""

    def __init__(self, database: SqlRunner) -> None:
        self._database = database

    async def due(
        self,
        at: float,
        limit: int,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> Sequence[DeliveryState]:
        query = (
            f"{DELIVERY} WHERE due_at <= ? AND job_id NOT IN ({_placeholders(without)})"
            f" AND host NOT IN ({_placeholders(hosts_without)}) ORDER BY due_at LIMIT ?"
        )
        values = (at, *without, *hosts_without, limit)
        return await self._database.read(
            lambda sql: [_state(row) for row in sql.execute(query, values)]
        )

    async def next_due(
        self,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> float | None:
        query = (
            "SELECT due_at FROM webhook_deliveries WHERE due_at IS NOT NULL"
            f" AND job_id NOT IN ({_placeholders(without)})"
            f" AND host NOT IN ({_placeholders(hosts_without)})"
            " ORDER BY due_at LIMIT 1"
        )
        values = (*without, *hosts_without)

        def next_due(sql: sqlite3.Connection) -> float | None:
            row = sql.execute(query, values).fetchone()
            return None if row is None else float(row[0])

        return await self._database.read(next_due)

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        query = (
            "UPDATE webhook_deliveries"
            " SET attempts = attempts + 1, error = ?, due_at = ?,"
            " secret = iif(? IS NULL, '', secret) WHERE job_id = ?"
        )
        values = (error, due_at, due_at, job_id)
        await self._database.transact(lambda sql: sql.execute(query, values))

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        def of(sql: sqlite3.Connection) -> DeliveryState | None:
            row = sql.execute(f"{DELIVERY} WHERE job_id = ?", (job_id,)).fetchone()
            return None if row is None else _state(row)

        return await self._database.read(of)


def write_deliveries(
    sql: sqlite3.Connection, deliveries: Sequence[WebhookDelivery], at: float
) -> None:
    """Write new deliveries, due at once, in the caller's transaction."""
    sql.executemany(
        "INSERT INTO webhook_deliveries (job_id, url, secret, host, due_at)"
        " VALUES (?, ?, ?, ?, ?)",
        [
            (each.job_id, each.webhook.url, each.webhook.secret, each.host, at)
            for each in deliveries
        ],
    )


def _state(row: tuple[Any, ...]) -> DeliveryState:
    job_id, url, secret, attempts, due_at, error = row
    return DeliveryState(
        WebhookDelivery(JobId(job_id), Webhook(url, secret)), attempts, due_at, error
    )


def _placeholders(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
