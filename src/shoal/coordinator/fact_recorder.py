"""Stores facts, all facts of a batch in one commit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal.coordinator.bookkeeping import Bookkeeper
from shoal.coordinator.store_health import StoreHealth
from shoal.domain import facts
from shoal.domain.histogram import SECONDS_SHORT, Histogram, observe
from shoal.pool.state import PoolState
from shoal.store.port import CommitId, Epoch, RecordedFact, Store, commit_ids
from shoal.transports.clock import Clock

RECORD_WITHIN = 0.25  # seconds


@dataclass(slots=True, eq=False)
class FactRecorder:
    """Stores facts with their ledger entries.

    A deferrable fact waits for the next commit, at most ``RECORD_WITHIN`` seconds:
    after a restart it would not be used.  ``wake`` is called when that time is over.
    ``commits`` are the ids of its commits; ``commit_seconds`` counts them by their
    time, repetitions included.
    """

    _store: Store
    _bookkeeper: Bookkeeper
    _health: StoreHealth
    _clock: Clock
    _wake: Callable[[], None]
    commits: Iterator[CommitId] = field(
        default_factory=partial(commit_ids, Epoch(0), "hub")
    )
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_SHORT))
    _waiting: list[RecordedFact] = field(default_factory=list)
    _record_by: float = math.inf

    @property
    def is_due(self) -> bool:
        """Whether a deferred fact must be stored now."""
        return self._clock.now() >= self._record_by

    async def record(self, kept: Sequence[facts.Fact], *, urgent: bool) -> None:
        """Store the facts in ``kept``; unless ``urgent``, they may wait.

        Repeats that until it succeeds.  Raises StoreError if it never can.
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
        entries = await self._health.read(partial(self._bookkeeper.seal, at))
        commit = next(self.commits)
        await self._health.write(
            partial(self._store.append, kept, at, earlier, entries, commit)
        )
        observe((self.commit_seconds, self._clock.now() - now))

    def _record_now(self) -> None:
        # Not left to comparing times: a timer may fire a little early.
        if self._waiting:
            self._record_by = -math.inf
            self._wake()


def is_deferrable(fact: facts.Fact) -> bool:
    """Say whether a fact may be stored with a later batch."""
    return isinstance(fact, facts.JobStarted | facts.WorkerLoadChanged)


def is_stored(fact: facts.Fact, pool: PoolState) -> bool:
    """Say whether a fact, which is not applied yet, belongs in the store."""
    if isinstance(fact, facts.JobSubmitted):
        return fact.job.terms.kept
    if isinstance(fact, facts.WorkerFact | facts.AccountFact | facts.AliasFact):
        return not isinstance(fact, facts.WorkerLoadChanged)
    opened = pool.jobs.get(fact.job_id)
    return opened is None or opened.job.terms.kept
