"""The log of the pool's events: the latest in memory, and older ones in the store.

An event is a fact with its job, its worker and a plain line.

The store has the facts about workers and accounts, for as long as it keeps them.  It
has facts about jobs with their jobs, so that only the latest of all jobs are listed.
Those of calls of functions are left out, because there may be thousands a second.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, takewhile
from operator import attrgetter
from typing import Annotated, TypeAlias, get_args

import msgspec
from aiohttp import web
from msgspec.structs import replace

from shoal.coordinator.fact_log import FrequentFacts
from shoal.domain import facts
from shoal.domain.credentials import Scope
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.http.operation import Operations
from shoal.pool.explanation import describe_submission, explain_fact
from shoal.store.port import NumberedFact, RecordedFact, Store
from shoal.transports.clock import Clock

api = Operations()

EVENTS_MAX = 5000  # kept about workers and accounts, and as many about jobs
FACTS_EXAMINED_MAX = 2000  # in the store, for one page
NUMBERS_PER_SECOND = 1000  # of events, in the long run
LOAD = facts.FACT_NAMES[facts.WorkerLoadChanged]  # is not stored
OF_WORKERS = frozenset(
    {
        *get_args(facts.WorkerFact),
        *get_args(facts.AccountFact),
        *get_args(facts.ModelFact),
    }
)


TEXT_MAX = 300  # characters; reasons and errors come from workers


class FactSubject(msgspec.Struct, frozen=True):
    """What a fact is about; None where it names none.

    ``worker`` is the name in operators' orders, which may be that of a machine.
    """

    job: JobId | None
    lease: LeaseNumber | None
    worker: str | None


class LeaseHolders:
    """Remembers which worker has which lease, for the facts that name only the lease.

    Of each job until its end, so memory is bounded by the number of open jobs.
    """

    def __init__(self) -> None:
        self._workers: dict[JobId, dict[LeaseNumber, WorkerId]] = {}

    def subject_of(self, fact: facts.Fact) -> FactSubject:
        """Return what a fact is about.  Call it with the facts in their order."""
        # Of each fact of each job: patterns that capture nothing are twice as fast.
        match fact:
            case facts.JobLeased() | facts.JobHedged():
                job, lease, worker = fact.job_id, fact.lease, fact.worker_id
                self._workers.setdefault(job, {})[lease] = worker
                return FactSubject(job, lease, worker)
            case facts.JobStarted() | facts.JobUnhedged():
                return self._under_lease(fact.job_id, fact.lease)
            case facts.JobSubmitted():
                return FactSubject(fact.job_id, None, None)
            case facts.JobCompleted():
                subject = self._under_lease(fact.job_id, fact.lease)
                self._workers.pop(fact.job_id, None)
                return subject
            case facts.JobFailed() | facts.JobCancelled() | facts.JobExpired():
                self._workers.pop(fact.job_id, None)
                return FactSubject(fact.job_id, None, None)
            case facts.JobRequeued():
                if fact.refused_by is None:
                    return self._under_lease(fact.job_id, fact.lease)
                return FactSubject(fact.job_id, fact.lease, fact.refused_by)
            case facts.LateResult():
                return FactSubject(fact.job_id, fact.lease, fact.worker_id)
            case facts.ReceiptPresented():
                return FactSubject(fact.job_id, None, fact.worker_id)
            case facts.WorkerMarked():
                return FactSubject(fact.about, None, fact.worker_id)
            case (
                facts.WorkerJoined()
                | facts.WorkerDraining()
                | facts.WorkerLeft()
                | facts.WorkerDismissed()
                | facts.WorkerLoadChanged()
                | facts.MachineCalled()
            ):
                return FactSubject(None, None, fact.worker_id)
            case (
                facts.WorkerSuspended()
                | facts.WorkerResumed()
                | facts.WorkerApproved()
                | facts.WorkerDisapproved()
            ):
                return FactSubject(None, None, fact.name)
            case (
                facts.WorkerTrusted()
                | facts.WorkerDistrusted()
                | facts.AccountCredited()
                | facts.AccountLimited()
                | facts.AliasSet()
                | facts.AliasRemoved()
                | facts.DeploymentSet()
                | facts.DeploymentRemoved()
            ):
                return FactSubject(None, None, None)

    def _under_lease(self, job: JobId, lease: LeaseNumber) -> FactSubject:
        held = self._workers.get(job)
        return FactSubject(job, lease, None if held is None else held.get(lease))


def line_of(fact: facts.Fact) -> str:
    """Return a fact as a plain line of bounded length."""
    if isinstance(fact, facts.JobSubmitted):  # with each job
        text = describe_submission(fact.job)
    else:
        text = explain_fact(fact)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def subjects(history: Iterable[RecordedFact]) -> list[FactSubject]:
    """Return what each fact of a job's history is about."""
    holders = LeaseHolders()
    return [holders.subject_of(each.fact) for each in history]


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


def to_event(
    number: int, at: float, fact: facts.Fact, subject: FactSubject
) -> PoolEvent:
    """Return the event of a fact."""
    name = facts.FACT_NAMES[type(fact)]
    return PoolEvent(number, at, name, subject.job, subject.worker, line_of(fact))


_SmallFact: TypeAlias = facts.JobLeased | facts.JobStarted | facts.JobCompleted


class _LoggedFact(msgspec.Struct, frozen=True):
    """An event as it is kept.

    Few people read the facts that every job has.  They are kept if they are small
    without the answer, and the line about one is written when it is read.  Of others,
    which may have prompts, only the line is kept.
    """

    number: int
    at: float
    name: str
    subject: FactSubject
    line: str | _SmallFact

    def event(self) -> PoolEvent:
        line = self.line if isinstance(self.line, str) else line_of(self.line)
        subject = self.subject
        return PoolEvent(
            self.number, self.at, self.name, subject.job, subject.worker, line
        )


class EventLog:
    """The latest events since the start, with consecutive numbers.

    Their numbers are greater than those of facts in the store, and than those of an
    earlier start.  ``next_number`` is that of the next event.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = self.next_number = int(clock.wall() * NUMBERS_PER_SECOND)
        self._frequent = FrequentFacts()
        self._holders = LeaseHolders()
        self._of_workers: deque[_LoggedFact] = deque(maxlen=EVENTS_MAX)
        self._of_jobs: deque[_LoggedFact] = deque(maxlen=EVENTS_MAX)

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Add facts that are not frequent."""
        at = self._clock.wall()
        for fact, frequent in zip(batch, self._frequent.among(batch), strict=True):
            if frequent:
                continue
            logged = _LoggedFact(
                self.next_number,
                at,
                facts.FACT_NAMES[type(fact)],
                self._holders.subject_of(fact),
                fact if isinstance(fact, facts.JobLeased) else _kept(fact),
            )
            self.next_number += 1
            of_workers = type(fact) in OF_WORKERS
            (self._of_workers if of_workers else self._of_jobs).append(logged)

    def latest(
        self, limit: int, before: int | None = None, worker: str = ""
    ) -> list[PoolEvent]:
        """Return the latest events, with numbers below ``before``, newest first.

        ``worker`` is as in ``concerns``.
        """
        found = (
            each.event()
            for each in self._newest_first()
            if (before is None or each.number < before)
            and concerns(each.subject.worker, worker)
        )
        return [*islice(found, limit)]

    def since(self, number: int, limit: int) -> list[PoolEvent]:
        """Return the events from a number on, oldest first; of many the latest."""
        newest = islice(self._newest_first(), limit)
        found = takewhile(lambda each: each.number >= number, newest)
        return [each.event() for each in found][::-1]

    def _newest_first(self) -> Iterator[_LoggedFact]:
        return merge(
            *(reversed(self._of_workers), reversed(self._of_jobs)),
            key=attrgetter("number"),
            reverse=True,
        )

    async def older(
        self, store: Store, limit: int, before: int | None = None, worker: str = ""
    ) -> tuple[list[PoolEvent], int | None]:
        """Return events from the store that are older than those in memory.

        ``before`` and ``worker`` are as in ``latest``.  Also returns the ``before`` of
        the next ones, None if there are none: of many events, only a limited number is
        tested.

        Raises StoreError.
        """
        if before is not None and before >= self._first:
            before = None
        skip = 0
        if before is None:
            skip = sum(each.name != LOAD for each in self._of_workers)
        examined = limit if not worker else FACTS_EXAMINED_MAX
        read = await store.worker_facts(examined, before, skip)
        events = [_stored_event(each) for each in read]
        found = [each for each in events if concerns(each.worker, worker)]
        if len(found) > limit:
            return found[:limit], found[limit - 1].number
        return found, read[-1].number if len(read) == examined else None


def concerns(about: str | None, worker: str) -> bool:
    """Say whether an event about a worker, or none, is about ``worker``.

    That may be the name of its machine; empty: every event is.
    """
    if not worker:
        return True
    return about is not None and worker in (about, peer_of(WorkerId(about)))


def _stored_event(stored: NumberedFact) -> PoolEvent:
    subject = LeaseHolders().subject_of(stored.fact)
    return to_event(stored.number, stored.at, stored.fact, subject)


def _kept(fact: facts.Fact) -> str | _SmallFact:
    """Return what is kept of a fact: itself without an answer, or its line."""
    if isinstance(fact, facts.JobStarted):
        return fact
    if isinstance(fact, facts.JobCompleted) and not fact.outcome.value:
        outcome = replace(fact.outcome, text="", choices=(), output="")
        return replace(fact, outcome=outcome, worker_receipt=None)
    return line_of(fact)


EVENT_LOG = web.AppKey("event_log", EventLog)


LISTED_MAX = 1000
EVENT_NUMBER_MAX = 2**53  # what JavaScript can count to

EventNumber = Annotated[int, msgspec.Meta(ge=0, le=EVENT_NUMBER_MAX)]


class EventQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many events to list, newest first, with numbers below ``before``.

    ``worker`` is the id of a worker, or the part of it that names its machine.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 100
    before: EventNumber | msgspec.UnsetType = msgspec.UNSET
    job: str = ""
    worker: str = ""


class EventList(msgspec.Struct, frozen=True):
    """Events, newest first; ``next`` is the ``before`` of the next page.

    A page may be short, or empty, and have a next one.
    """

    data: list[PoolEvent]
    next: int | None


@api.get("/admin/events", "List events, newest first", Scope.MONITOR, lists=True)
async def list_events(
    gateway: OperatorsGateway, request: web.Request, query: EventQuery
) -> EventList:
    log = request.app[EVENT_LOG]
    if query.job:
        return await _list_of_job(gateway.store, query)
    return await _list_of_pool(gateway.store, log, query)


async def _list_of_pool(store: Store, log: EventLog, query: EventQuery) -> EventList:
    limit = query.limit
    before = None if query.before is msgspec.UNSET else query.before
    latest = log.latest(limit, before, query.worker)
    if len(latest) == limit:
        return EventList(latest, latest[-1].number)
    older, more = await log.older(store, limit - len(latest), before, query.worker)
    return EventList(latest + older, more)


async def _list_of_job(store: Store, query: EventQuery) -> EventList:
    """List the history of a job, whose events are numbered from 1."""
    history = await store.history(JobId(query.job))
    events = [
        to_event(number, each.at, each.fact, subject)
        for number, (each, subject) in enumerate(
            zip(history, subjects(history), strict=True), start=1
        )
    ]
    end = len(events) + 1 if query.before is msgspec.UNSET else query.before
    found = [
        each
        for each in reversed(events)
        if each.number < end and concerns(each.worker, query.worker)
    ]
    page = found[: query.limit]
    return EventList(page, page[-1].number if len(found) > len(page) else None)
