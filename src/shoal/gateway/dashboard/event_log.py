"""The latest events of the pool, in memory.

Facts about workers are in the store as well, for as long as it keeps them.  Facts about
jobs are stored with their jobs: only the latest of all jobs are here.  Those of calls
of functions are left out, for there may be thousands a second.
"""

from collections import deque
from collections.abc import Callable

import msgspec
from aiohttp import web

from shoal.coordinator.fact_log import FrequentFacts
from shoal.domain.facts import FACT_NAMES, AccountFact, Fact, WorkerFact
from shoal.domain.ids import JobId
from shoal.gateway.dashboard.fact_events import FactSubject, LeaseHolders, line_of
from shoal.transports.clock import Clock

EVENTS_MAX = 5000  # kept about workers and accounts, and as many about jobs
NUMBERS_PER_SECOND = 1000  # of events, in the long run


class PoolEvent(msgspec.Struct, frozen=True):
    """An event; ``at`` is in Unix seconds.

    ``number`` increases with each event, also over restarts.  ``job`` and ``worker``
    are null where it is about none.
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
    """The latest events since the start."""

    def __init__(self, clock: Clock) -> None:
        self.started_at = clock.wall()
        # More than any number of an earlier start.
        self.first = int(self.started_at * NUMBERS_PER_SECOND)
        self._clock = clock
        self._next = self.first
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
        is_stored_apart = isinstance(fact, WorkerFact | AccountFact)
        (self._of_workers if is_stored_apart else self._of_jobs).append(event)
        for listener in self._listeners:
            listener(event)


EVENT_LOG = web.AppKey("event_log", EventLog)
