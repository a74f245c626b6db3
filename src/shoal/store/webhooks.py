"""Webhook deliveries: pending until the receiver accepts them or they are given up.

``Store.append`` adds a delivery in the transaction that ends its job.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook


@dataclass(frozen=True, slots=True)
class WebhookDelivery:
    """A notification of the end of a job, to send to its webhook."""

    job_id: JobId
    webhook: Webhook

    @property
    def host(self) -> str:
        """The host of the URL, by which concurrent deliveries are limited."""
        try:
            return urlsplit(self.webhook.url).hostname or ""
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """The progress of a delivery.

    The next attempt is at ``due_at``, in Unix seconds; if that is None, the delivery
    succeeded, or was abandoned because of ``error``.
    """

    delivery: WebhookDelivery
    attempts: int = 0
    due_at: float | None = None
    error: str | None = None  # of the last attempt


class WebhookStore(Protocol):
    """Pending and finished deliveries; ``Store.prune`` deletes them with their jobs.

    All methods raise StoreError.
    """

    async def due(
        self,
        at: float,
        limit: int,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> Sequence[DeliveryState]:
        """Return the deliveries that are due at a Unix time, the longest overdue first.

        Excludes those of the jobs in ``without`` and of the hosts in ``hosts_without``.
        """
        ...

    async def next_due(
        self,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> float | None:
        """Return the Unix time of the next delivery; None if none is pending."""
        ...

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        """Record an attempt, its error, and the time of the next attempt.

        If ``due_at`` is None, the delivery is finished, and its secret is deleted.
        """
        ...

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        """Return the delivery of a job that has ended; None if it has no webhook."""
        ...
