"""The log of the pool's events: the latest in memory, and older ones in the store.

The store has the facts about workers and accounts, for as long as it keeps them.  It
has facts about jobs with their jobs, so that only the latest of all jobs are listed.
Those of calls of functions are left out, for there may be thousands a second.
"""

from collections import deque
from collections.abc import Callable
from heapq import merge
from itertools import islice
from operator import attrgetter

import msgspec
from aiohttp import web

from shoal.coordinator.fact_log import FrequentFacts
from shoal.domain.facts import (
    FACT_NAMES,
    AccountFact,
    Fact,
    WorkerFact,
    WorkerLoadChanged,
)
from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.gateway.dashboard.fact_events import FactSubject, LeaseHolders, line_of
from shoal.store.port import NumberedFact, Store
from shoal.transports.clock import Clock

EVENTS_MAX = 5000  # kept about workers and accounts, and as many about jobs
EXAMINED_MAX = 2000  # stored facts that are tested for one page
NUMBERS_PER_SECOND = 1000  # of events, in the long run
LOAD = FACT_NAMES[WorkerLoadChanged]  # is not stored


class PoolEvent(msgspec.Struct, frozen=True):
    """An event; ``at`` is in Unix seconds.

    Newer events have higher numbers.  ``job`` and ``worker`` are null where it is about
    none.
    """

    number: int
    at: float
    fact: str
    job: JobId | None
    worker: str | None
    text: str


def to_event(number: int, at: float, fact: Fact, subject: FactSubject) -> PoolEvent:
    """Return the event of a fact."""
    name = FACT_NAMES[type(fact)]
    return PoolEvent(number, at, name, subject.job, subject.worker, line_of(fact))


class EventLog:
    """The latest events since the start.

    Their numbers are greater than those of facts in the store, and than those of an
    earlier start.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = self._next = int(clock.wall() * NUMBERS_PER_SECOND)
        self._frequent = FrequentFacts()
        self._holders = LeaseHolders()
        self._of_workers: deque[PoolEvent] = deque(maxlen=EVENTS_MAX)
        self._of_jobs: deque[PoolEvent] = deque(maxlen=EVENTS_MAX)
        self._listeners: list[Callable[[PoolEvent], None]] = []

    def subscribe(self, listener: Callable[[PoolEvent], None]) -> None:
        """Call ``listener`` with every event from now on."""
        self._listeners.append(listener)

    def on_fact(self, fact: Fact) -> None:
        """Add a fact, unless it is frequent."""
        if self._frequent.is_frequent(fact):
            return
        subject = self._holders.subject_of(fact)
        event = to_event(self._next, self._clock.wall(), fact, subject)
        self._next += 1
        of_worker = isinstance(fact, WorkerFact | AccountFact)
        (self._of_workers if of_worker else self._of_jobs).append(event)
        for listener in self._listeners:
            listener(event)

    def latest(
        self, limit: int, before: int | None = None, worker: str = ""
    ) -> list[PoolEvent]:
        """Return the latest events, with numbers below ``before``, newest first.

        ``worker`` is as in ``concerns``.
        """
        events = merge(
            *(reversed(self._of_workers), reversed(self._of_jobs)),
            key=attrgetter("number"),
            reverse=True,
        )
        found = (
            each
            for each in events
            if (before is None or each.number < before) and concerns(each, worker)
        )
        return [*islice(found, limit)]

    async def older(
        self, store: Store, limit: int, before: int | None = None, worker: str = ""
    ) -> tuple[list[PoolEvent], int | None]:
        """Return events from the store that are older than those in memory.

        ``before`` and ``worker`` are as in ``latest``.  Also returns the ``before`` of
        the next ones, None if there are none: of many events, only so many are tested.

        Raises StoreError.
        """
        if before is not None and before >= self._first:
            before = None
        skip = 0
        if before is None:
            skip = sum(each.fact != LOAD for each in self._of_workers)
        examined = limit if not worker else EXAMINED_MAX
        facts = await store.worker_facts(examined, before, skip)
        events = [_stored_event(each) for each in facts]
        found = [each for each in events if concerns(each, worker)]
        if len(found) > limit:
            return found[:limit], found[limit - 1].number
        return found, facts[-1].number if len(facts) == examined else None


def concerns(event: PoolEvent, worker: str) -> bool:
    """Say whether an event is about a worker, or a machine's; empty: about anything."""
    if not worker:
        return True
    about = event.worker
    return about is not None and worker in (about, peer_of(WorkerId(about)))


def _stored_event(stored: NumberedFact) -> PoolEvent:
    subject = LeaseHolders().subject_of(stored.fact)
    return to_event(stored.number, stored.at, stored.fact, subject)


EVENT_LOG = web.AppKey("event_log", EventLog)
