"""Webhook deliveries in the SQLite store."""

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.store.sqlite.database import SqlRunner, execute, select, select_first
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
        due = select(_state, query, at, *without, *hosts_without, limit)
        return await self._database.read(due)

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
        due = select_first(float, query, *without, *hosts_without)
        return await self._database.read(due)

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        query = (
            "UPDATE webhook_deliveries"
            " SET attempts = attempts + 1, error = ?, due_at = ?,"
            " secret = iif(? IS NULL, '', secret) WHERE job_id = ?"
        )
        attempt = execute(query, error, due_at, due_at, job_id)
        await self._database.transact(attempt)

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        state = select_first(_state, f"{DELIVERY} WHERE job_id = ?", job_id)
        return await self._database.read(state)


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


def _state(job_id: str, url: str, secret: str, *rest: Any) -> DeliveryState:
    return DeliveryState(WebhookDelivery(JobId(job_id), Webhook(url, secret)), *rest)


def _placeholders(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
