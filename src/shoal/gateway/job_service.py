"""The jobs of the pool, as HTTP handlers that run and read them see them.

They reach the hub in no other way, so that it may be in another process.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Protocol

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.hub import Hub
from shoal.domain.credentials import Key
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import Work
from shoal.gateway.http.job_quotas import JobQuotas, Pay
from shoal.pool.job_admission import without_tools
from shoal.pool.models.aliases import with_real_model


class JobService(Protocol):
    """Runs, reads and cancels jobs.  Methods that do not wait do not fail either."""

    def new_id(self) -> JobId:
        """Return the id of a new job."""

    @property
    def models(self) -> Collection[str]:
        """The models of all workers, and those that machines can load."""

    @property
    def aliases(self) -> Collection[str]:
        """The names that stand for models, as far as they are known here."""

    def with_real_model(self, work: Work, owner: str, *, hosted: bool = False) -> Work:
        """Return work with the model that its alias stands for; else as it is.

        ``hosted``: whether a hosted provider may do it.
        """

    def without_tools(self, work: Work, owner: str) -> Work:
        """Return a chat without its tools if no worker can call them for ``owner``."""

    def run(
        self,
        job: Job,
        key: Key,
        headers: dict[str, str],
        pay: Pay | None = None,
        *,
        early: bool = False,
        seen: Sequence[AnswerPiece] | None = None,
    ) -> AbstractAsyncContextManager[AnswerCursor]:
        """Run ``job`` for the length of the block, see ``JobQuotas.run_job``."""

    async def wait_accepted(self, job_id: JobId) -> None:
        """Wait until a job is accepted.  Raises the error it was refused with."""

    async def waits_for(self, job_id: JobId) -> str | None:
        """Return what a queued job waits for; None: it is not queued."""

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerCursor | None]:
        """Read an open job's answer without keeping the job alive.

        Yields None if the job is not open.
        """

    def is_open(self, job_id: JobId) -> bool:
        """Say whether a job has not ended."""

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; return whether it was open."""

    async def cancel_now(self, job_id: JobId, reason: str) -> None:
        """Cancel a job, and wait until that is in the store.  Raises StoreError."""


class LocalJobs:
    """The jobs of a hub in this process."""

    def __init__(self, hub: Hub, quotas: JobQuotas) -> None:
        self._pool = hub.pool
        self.new_id = hub.new_id
        self.with_real_model = partial(with_real_model, hub.pool)
        self.without_tools = partial(without_tools, hub.pool)
        self.run = quotas.run_job
        self.wait_accepted = hub.wait_accepted
        self._waits_for = hub.waits_for
        self.observe = hub.observe_job
        self.cancel = hub.cancel
        self.cancel_now = hub.cancel_now

    @property
    def models(self) -> Collection[str]:
        return self._pool.roster.names

    @property
    def aliases(self) -> Collection[str]:
        return self._pool.aliases.keys()

    async def waits_for(self, job_id: JobId) -> str | None:
        return self._waits_for(job_id)

    def is_open(self, job_id: JobId) -> bool:
        return job_id in self._pool.jobs
