"""Webhook deliveries in memory."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shoal.domain.ids import JobId
from shoal.domain.work import Webhook
from shoal.store.webhooks import DeliveryState, WebhookDelivery


class MemoryWebhooks:
    """Keeps the calls in a dictionary."""

    def __init__(self) -> None:
        self._calls: dict[JobId, DeliveryState] = {}

    def write(self, calls: Sequence[WebhookDelivery], at: float) -> None:
        """Take in that webhooks are to be called."""
        self._calls |= {call.job_id: DeliveryState(call, due_at=at) for call in calls}

    def forget(self, jobs: Iterable[JobId]) -> None:
        """Forget the calls of jobs that are forgotten."""
        for job_id in jobs:
            self._calls.pop(job_id, None)

    async def due(
        self,
        at: float,
        limit: int,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> Sequence[DeliveryState]:
        waiting = [
            (tried.due_at, tried)
            for tried in self._calls.values()
            if tried.due_at is not None
            and tried.due_at <= at
            and tried.delivery.job_id not in without
            and tried.delivery.host not in hosts_without
        ]
        waiting.sort(key=lambda each: each[0])
        return [tried for _, tried in waiting[:limit]]

    async def next_due(
        self,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> float | None:
        times = (
            tried.due_at
            for job_id, tried in self._calls.items()
            if tried.due_at is not None
            and job_id not in without
            and tried.delivery.host not in hosts_without
        )
        return min(times, default=None)

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        if (tried := self._calls.get(job_id)) is None:
            return  # its job was pruned meanwhile
        call = tried.delivery
        if due_at is None:
            call = replace(call, webhook=Webhook(call.webhook.url, ""))
        self._calls[job_id] = DeliveryState(call, tried.attempts + 1, due_at, error)

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        return self._calls.get(job_id)
