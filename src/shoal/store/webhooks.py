"""Webhook deliveries: pending until the receiver accepts them or they are given up.

``Store.append`` adds a delivery in the transaction that ends its job.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebhookDelivery:
    """A notification of the end of a job, to send to its webhook."""

    job_id: JobId
    webhook: Webhook

    @property
    def host(self) -> str:
        """The host of the URL; empty if the URL is invalid."""
        try:
            return urlsplit(self.webhook.url).hostname or ""
        except ValueError:
            return ""

    @property
    def place(self) -> str:
        """Host and port of the URL; empty if the URL is invalid."""
        try:
            url = urlsplit(self.webhook.url)
            return f"{url.hostname}:{url.port or PORTS[url.scheme]}"
        except (ValueError, KeyError):
            return ""


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """The progress of a delivery.

    ``owner`` is the key of its job.  Deliveries of one key to one place are one
    ``lane``, with limits of its own.  The next attempt is at ``due_at``, in Unix
    seconds; if that is None, the delivery succeeded, or was abandoned because of
    ``error``.
    """

    delivery: WebhookDelivery
    owner: str
    lane: str
    attempts: int = 0
    due_at: float | None = None
    error: str | None = None  # of the last attempt


class WebhookStore(Protocol):
    """Pending and finished deliveries; ``Store.prune`` deletes them with their jobs.

    All methods raise StoreError.
    """

    async def first_of_lanes(
        self, without: Collection[JobId] = ()
    ) -> Sequence[DeliveryState]:
        """Return the pending delivery of each lane that is due first, in any order.

        Excludes those of the jobs in ``without``.
        """

    async def limit_delays(self, at: float, delays: Sequence[float]) -> None:
        """Make pending deliveries due at ``at`` that would wait longer than they may.

        ``delays[n]`` is the longest delay after n attempts, in seconds.
        """

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        """Record an attempt, its error, and the time of the next attempt.

        If ``due_at`` is None, the delivery is finished, and its secret is deleted.
        """

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        """Return the delivery of a job that has ended; None if it has no webhook."""
