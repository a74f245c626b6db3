"""Webhook deliveries: pending until the receiver accepts them or they are given up.

``Store.append`` adds a delivery in the transaction that ends its job.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from shoal.domain.ids import JobId
from shoal.domain.work import Webhook


@dataclass(frozen=True, slots=True)
class WebhookDelivery:
    """That a webhook is to be told of the end of a job."""

    job_id: JobId
    webhook: Webhook

    @property
    def host(self) -> str:
        """What is called, as far as not too much of it is done at a time."""
        try:
            return urlsplit(self.webhook.url).hostname or ""
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """How far a call has come.

    It waits until ``due_at``, in Unix seconds; without, it was delivered, or given up
    because of ``error``.
    """

    delivery: WebhookDelivery
    attempts: int = 0
    due_at: float | None = None
    error: str | None = None  # of the last attempt


class WebhookStore(Protocol):
    """The calls there are; they go with their jobs, see ``Store.prune``.

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
        """Return the calls that are due at a Unix time, who waited longest first.

        Those of the jobs and hosts ``without`` are left out.
        """
        ...

    async def next_due(
        self,
        *,
        without: Collection[JobId] = (),
        hosts_without: Collection[str] = (),
    ) -> float | None:
        """Return when the first of them is due; None if none waits."""
        ...

    async def record_attempt(
        self, job_id: JobId, error: str | None, due_at: float | None
    ) -> None:
        """Note that a job's call was tried once more, what came of it, and when next.

        Without ``due_at`` it is over, and its secret is forgotten.
        """
        ...

    async def state_of(self, job_id: JobId) -> DeliveryState | None:
        """Return the call of a job that has ended, if there is one."""
        ...
