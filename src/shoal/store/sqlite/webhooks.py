"""Webhook deliveries in the SQLite store."""

import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.store.sqlite.database import SqlRunner, execute, select_first
from shoal.store.webhooks import DeliveryState, WebhookDelivery

# A place alone names a host only, if an earlier version wrote it.
LANE = "jobs.owner || ' ' || host"
DELIVERY = f"""SELECT job_id, url, secret, jobs.owner, {LANE}, attempts, due_at,
               webhook_deliveries.error
               FROM webhook_deliveries CROSS JOIN jobs ON jobs.id = job_id"""
NEXT = f"""{DELIVERY} WHERE due_at <= ?
           AND job_id NOT IN (SELECT value FROM json_each(?))
           AND jobs.owner NOT IN (SELECT value FROM json_each(?))
           AND {LANE} NOT IN (SELECT value FROM json_each(?))
           ORDER BY due_at LIMIT 1"""


class SqliteWebhooks:
    """Reads what ``write_deliveries`` wrote beside the jobs, and records attempts."""

    def __init__(self, database: SqlRunner) -> None:
        self._database = database

    async def next(
        self,
        at: float,
        *,
        without: Collection[JobId] = (),
        owners_without: Collection[str] = (),
        lanes_without: Collection[str] = (),
    ) -> DeliveryState | None:
        excluded = (without, owners_without, lanes_without)
        lists = (json.dumps(list(each)) for each in excluded)
        return await self._database.read(select_first(_state, NEXT, at, *lists))

    async def limit_delays(self, at: float, delays: Sequence[float]) -> None:
        def limit(sql: sqlite3.Connection) -> None:
            sql.executemany(
                "UPDATE webhook_deliveries SET due_at = ?"
                " WHERE due_at > ? AND attempts = ?",
                [(at, at + delay, number) for number, delay in enumerate(delays)],
            )

        await self._database.transact(limit)

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
            (each.job_id, each.webhook.url, each.webhook.secret, each.place, at)
            for each in deliveries
        ],
    )


def _state(job_id: str, url: str, secret: str, *rest: Any) -> DeliveryState:
    return DeliveryState(WebhookDelivery(JobId(job_id), Webhook(url, secret)), *rest)
