"""Webhook deliveries in the store."""

from collections.abc import Collection, Sequence
from typing import Any

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.store.sql.database import Database, Sql, Texts, execute, select, select_first
from shoal.store.webhooks import DeliveryState, WebhookDelivery

# A place alone names a host only, if an earlier version wrote it.
DELIVERY = """SELECT job_id, url, secret, owner, owner || ' ' || host, attempts, due_at,
              error FROM webhook_deliveries"""
# From the first row of each lane in the index to that of the next: the deliveries
# between them, of which there may be any number, are not read.
FIRST_OF_LANES = f"""
    WITH RECURSIVE lanes (first) AS (
        SELECT (SELECT rowid FROM webhook_deliveries
                WHERE due_at IS NOT NULL AND owner >= ''
                ORDER BY owner, host LIMIT 1)
        UNION ALL
        SELECT coalesce(
            (SELECT rowid FROM webhook_deliveries WHERE due_at IS NOT NULL
             AND owner = lane.owner AND host > lane.host ORDER BY host LIMIT 1),
            (SELECT rowid FROM webhook_deliveries WHERE due_at IS NOT NULL
             AND owner > lane.owner ORDER BY owner, host LIMIT 1)
        )
        FROM lanes CROSS JOIN webhook_deliveries AS lane WHERE lane.rowid = first
    )
    {DELIVERY} WHERE rowid IN (
        SELECT (SELECT rowid FROM webhook_deliveries
                WHERE due_at IS NOT NULL
                AND owner = lane.owner AND host = lane.host
                AND job_id NOT IN (SELECT value FROM json_each(?))
                ORDER BY due_at LIMIT 1)
        FROM lanes CROSS JOIN webhook_deliveries AS lane WHERE lane.rowid = first
    )"""


class SqlWebhooks:
    """Reads what ``write_deliveries`` wrote beside the jobs, and records attempts."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database

    async def first_of_lanes(
        self, without: Collection[JobId] = ()
    ) -> Sequence[DeliveryState]:
        first = select(_state, FIRST_OF_LANES, Texts(without))
        return await self._database.read_list(first)

    async def limit_delays(self, at: float, delays: Sequence[float]) -> None:
        def limit(sql: Sql) -> None:
            sql.executemany(
                "UPDATE webhook_deliveries SET due_at = ?"
                " WHERE due_at > ? AND attempts = ?",
                [(at, at + delay, number) for number, delay in enumerate(delays)],
            )

        await self._database.transact(limit)

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        ended = ", secret = ''" if due_at is None else ""
        query = f"""UPDATE webhook_deliveries
                    SET attempts = attempts + 1, error = ?, due_at = ?{ended}
                    WHERE job_id = ?"""
        attempt = execute(query, error, due_at, job_id)
        await self._database.transact(attempt)

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        state = select_first(_state, f"{DELIVERY} WHERE job_id = ?", job_id)
        return await self._database.read(state)


def write_deliveries(
    sql: Sql, deliveries: Sequence[WebhookDelivery], at: float
) -> None:
    """Write new deliveries, due at once, in the caller's transaction."""
    sql.executemany(
        "INSERT INTO webhook_deliveries (job_id, url, secret, host, due_at, owner)"
        " SELECT id, ?, ?, ?, ?, owner FROM jobs WHERE id = ?",
        [
            (each.webhook.url, each.webhook.secret, each.place, at, each.job_id)
            for each in deliveries
        ],
    )


def _state(job_id: str, url: str, secret: str, *rest: Any) -> DeliveryState:
    return DeliveryState(WebhookDelivery(JobId(job_id), Webhook(url, secret)), *rest)
