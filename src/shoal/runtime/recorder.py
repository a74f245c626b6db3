"""Puts facts into the store, all that were decided together in one commit."""

import math
from collections.abc import Callable, Sequence

from shoal.domain.facts import (
    AccountFact,
    Fact,
    JobStarted,
    JobSubmitted,
    WorkerConditioned,
    WorkerFact,
)
from shoal.pool.state import Pool
from shoal.runtime.clerk import Clerk
from shoal.runtime.clock import Clock
from shoal.store.port import Recorded, Store

RECORD_WITHIN = 0.25  # seconds that a fact may wait for others to be stored with


class Recorder:
    """Stores facts with what they mean for the books.

    That a job has begun is of no use to a coordinator that starts again, which gives it
    out anew: it waits for the next commit, but not for long.  ``wake`` is called when
    it has waited enough.
    """

    def __init__(
        self, store: Store, clerk: Clerk, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._clerk = clerk
        self._clock = clock
        self._wake = wake
        self._waiting: list[Recorded] = []
        self._record_by = math.inf

    @property
    def due(self) -> bool:
        """Whether something has waited enough."""
        return self._clock.now() >= self._record_by

    async def record(self, kept: Sequence[Fact], *, urgent: bool) -> None:
        """Store what is to be ``kept``; what is not ``urgent`` may wait.

        Raises StoreError.
        """
        now, at = self._clock.now(), self._clock.wall()
        if not urgent and now < self._record_by:
            if not self._waiting:
                self._record_by = now + RECORD_WITHIN
                self._clock.call_at(self._record_by, self._record_now)
            self._waiting += [Recorded(at, fact) for fact in kept]
            return
        earlier, self._waiting = self._waiting, []
        self._record_by = math.inf
        entries = await self._clerk.entries(at)
        await self._store.append(kept, at, earlier, entries)

    def _record_now(self) -> None:
        # Not left to comparing times: a timer may fire a little early.
        if self._waiting:
            self._record_by = -math.inf
            self._wake()


def can_wait(fact: Fact) -> bool:
    """Say whether nothing hangs on a fact's being stored at once."""
    return isinstance(fact, JobStarted | WorkerConditioned)


def is_kept(fact: Fact, pool: Pool) -> bool:
    """Say whether a fact, which is not applied yet, is of any use in the store."""
    if isinstance(fact, JobSubmitted):
        return fact.job.terms.kept
    if isinstance(fact, WorkerFact | AccountFact):
        return not isinstance(fact, WorkerConditioned)
    opened = pool.jobs.get(fact.job_id)
    return opened is None or opened.job.terms.kept
