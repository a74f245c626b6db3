"""Stores facts, all facts of a batch in one commit."""

import math
from collections.abc import Callable, Sequence

from shoal.coordinator.bookkeeping import Bookkeeper
from shoal.domain.facts import (
    AccountFact,
    Fact,
    JobStarted,
    JobSubmitted,
    WorkerFact,
    WorkerLoadChanged,
)
from shoal.pool.state import PoolState
from shoal.store.port import RecordedFact, Store
from shoal.transports.clock import Clock

RECORD_WITHIN = 0.25  # seconds that a fact may wait for others to be stored with


class FactRecorder:
    """Stores facts with what they mean for the books.

    That a job has begun is of no use to a coordinator that starts again, which gives it
    out anew: it waits for the next commit, but not for long.  ``wake`` is called when
    it has waited enough.
    """

    def __init__(
        self, store: Store, clerk: Bookkeeper, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._clerk = clerk
        self._clock = clock
        self._wake = wake
        self._waiting: list[RecordedFact] = []
        self._record_by = math.inf

    @property
    def is_due(self) -> bool:
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
            self._waiting += [RecordedFact(at, fact) for fact in kept]
            return
        earlier, self._waiting = self._waiting, []
        self._record_by = math.inf
        entries = await self._clerk.seal(at)
        await self._store.append(kept, at, earlier, entries)

    def _record_now(self) -> None:
        # Not left to comparing times: a timer may fire a little early.
        if self._waiting:
            self._record_by = -math.inf
            self._wake()


def is_deferrable(fact: Fact) -> bool:
    """Say whether nothing hangs on a fact's being stored at once."""
    return isinstance(fact, JobStarted | WorkerLoadChanged)


def is_stored(fact: Fact, pool: PoolState) -> bool:
    """Say whether a fact, which is not applied yet, is of any use in the store."""
    if isinstance(fact, JobSubmitted):
        return fact.job.terms.kept
    if isinstance(fact, WorkerFact | AccountFact):
        return not isinstance(fact, WorkerLoadChanged)
    opened = pool.jobs.get(fact.job_id)
    return opened is None or opened.job.terms.kept
