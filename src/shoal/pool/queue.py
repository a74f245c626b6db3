"""The waiting jobs of one model, in the order of service."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import count
from typing import TypeAlias

import msgspec
from msgspec import field

from shoal.domain.ids import JobId
from shoal.domain.job import Priority
from shoal.pool.fair_shares import FairShares, Lane, OwnerCounts, Rank, place_of
from shoal.pool.open_job import Need, OpenJob

PRIORITY_ORDER = tuple(sorted(Priority, key=lambda each: -each.value))
OVERTAKEN_BY_MAX = 16  # rounds after that of a job that is answered whole


class Turn(msgspec.Struct):
    """The turn of a waiting job in a plan.

    The plan notes whether the job was ``served``, and ``only_for`` which owners jobs of
    the same need may still be served; None: for all.
    """

    job: OpenJob
    served: bool = False
    only_for: Collection[str] | None = None


class JobQueue(msgspec.Struct):
    """The waiting jobs of one model.

    Requeued jobs, which have waited their turn once, go first.  The others
    go by priority, and within one priority the owners with the fewest jobs running go
    first (max-min fair sharing).  The users of one owner take turns: each has one job
    in a round, its oldest.  What is streamed goes before what is answered whole
    (``JobTerms.whole``) unless it is more than ``OVERTAKEN_BY_MAX`` rounds later: so
    the whole ones have their turn, too.

    Jobs that need the same of a worker share a lane, so that a plan passes over all of
    them at once if no free worker can take them.
    """

    shares: FairShares = field(default_factory=FairShares)
    number: int = 0  # orders the queues by age
    since: float = 0.0  # when its first job began to wait
    _requeued: dict[Need, OrderedDict[JobId, OpenJob]] = field(default_factory=dict)
    _fresh: dict[Priority, "_Level"] = field(default_factory=dict)
    _size: int = 0
    _requeues: int = 0
    _arrivals: Iterator[int] = field(default_factory=count)
    _turns: Iterator[int] = field(default_factory=count)
    """Numbers owners in the order of service."""

    def __bool__(self) -> bool:
        return bool(self._size)

    def __len__(self) -> int:
        return self._size

    def add(self, job: OpenJob) -> None:
        """Add a job."""
        self._size += 1
        job.number = next(self._arrivals)
        if job.lease:
            self._requeues += 1
            self._requeued.setdefault(job.need, OrderedDict())[job.job.id] = job
            return
        level = self._fresh.get(job.job.priority)
        if level is None:
            level = self._fresh[job.job.priority] = _Level(self.shares)
        level.add(job, next(self._turns))

    def remove(self, job: OpenJob) -> None:
        """Remove a job; its owner then comes after the others."""
        self._size -= 1
        if job.lease:
            self._requeues -= 1
            lane = self._requeued[job.need]
            del lane[job.job.id]
            if not lane:
                del self._requeued[job.need]
            return
        level = self._fresh[job.job.priority]
        level.remove(job, next(self._turns))
        if not level.size:
            del self._fresh[job.job.priority]

    def in_order(self, above: Priority | None = None) -> Iterator[Turn]:
        """Yield the jobs in the order in which they should be served.

        With ``above``, only requeued jobs and those of higher priorities.  What the
        caller notes in a turn before it asks for the next counts from there.
        """
        served: dict[str, int] = {}
        if self._requeued:
            yield from self._requeued_in_order(served)
        for priority in PRIORITY_ORDER:
            if priority is above:
                return
            if priority in self._fresh:
                yield from self._fresh[priority].in_order(served)

    def ahead_of(self, owner: str, priority: Priority) -> int:
        """Return how many jobs are served before a new one of ``owner``, about.

        Of the same priority, as many of each other owner's as of its own.
        """
        ahead = self._requeues
        for each, level in self._fresh.items():
            if each.value > priority.value:
                ahead += level.size
            elif each is priority:
                ahead += level.ahead_of(owner)
        return ahead

    def _requeued_in_order(self, served: dict[str, int]) -> Iterator[Turn]:
        lanes = [iter(jobs.values()) for jobs in self._requeued.values()]
        only_for: dict[int, Collection[str]] = {}
        heads: list[tuple[int, int, OpenJob]] = []

        def advance(lane: int) -> None:
            if (job := next(lanes[lane], None)) is not None:
                heapq.heappush(heads, (job.number, lane, job))

        for each in range(len(lanes)):
            advance(each)
        while heads:
            _, lane, job = heapq.heappop(heads)
            if lane not in only_for or job.job.owner in only_for[lane]:
                turn = Turn(job)
                yield turn
                if turn.served:
                    served[job.job.owner] = served.get(job.job.owner, 0) + 1
                if turn.only_for is not None:
                    only_for[lane] = turn.only_for
            if only_for.get(lane, True):
                advance(lane)


class _Owner(msgspec.Struct):
    """What an owner has waiting: its turn among equals, its jobs, and their lanes.

    ``users`` are those with jobs here, each with their number and the last round.
    """

    turn: int
    jobs: int = 0
    lanes: dict["_LaneKey", Lane] = field(default_factory=dict)
    users: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, job: OpenJob) -> None:
        """Count a job, and give it the next round of its user."""
        user = _user_of(job)
        jobs, last = self.users.get(user, (0, -1))
        if not jobs:
            heads = (lane.jobs[job.job.owner][0] for lane in self.lanes.values())
            last = min((head.round - _delay_of(head) for head in heads), default=0) - 1
        self.users[user] = jobs + 1, last + 1
        self.jobs += 1
        job.round = last + 1 + _delay_of(job)

    def remove(self, job: OpenJob) -> None:
        """Count a job no more."""
        self.jobs -= 1
        user = _user_of(job)
        jobs, last = self.users.pop(user)
        if jobs > 1:
            self.users[user] = jobs - 1, last


def _user_of(job: OpenJob) -> str:
    return job.job.terms.end_user or job.job.terms.user


def _delay_of(job: OpenJob) -> int:
    """Return for how many rounds a job lets others overtake it."""
    return OVERTAKEN_BY_MAX + 1 if job.job.terms.whole else 0


_LaneKey: TypeAlias = tuple[Need, bool]
"""What the jobs of a lane need, and whether they are answered whole."""


class _Level(msgspec.Struct):
    """The waiting jobs of one priority."""

    shares: FairShares
    size: int = 0
    lanes: dict[_LaneKey, Lane] = field(default_factory=dict)
    owners: dict[str, _Owner] = field(default_factory=dict)
    counts: OwnerCounts = field(default_factory=OwnerCounts)

    def add(self, job: OpenJob, turn: int) -> None:
        """Add a job; ``turn`` is its owner's, if that has no other here."""
        self.size += 1
        owner = self.owners.get(job.job.owner)
        if owner is None:
            owner = self.owners[job.job.owner] = _Owner(turn)
        owner.add(job)
        self.counts.add(owner.jobs, 1)
        key = job.need, job.job.terms.whole
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self.shares)
        lane.add(job, owner.turn)
        owner.lanes[key] = lane

    def remove(self, job: OpenJob, turn: int) -> None:
        """Remove a job; ``turn`` is the next of its owner."""
        self.size -= 1
        name, key = job.job.owner, (job.need, job.job.terms.whole)
        owner, lane = self.owners[name], self.lanes[key]
        lane.remove(job)
        if name not in lane.jobs:
            del owner.lanes[key]
        if not lane.jobs:
            del self.lanes[key]
        self.counts.add(owner.jobs, -1)
        owner.remove(job)
        if not owner.jobs:
            del self.owners[name]
            return
        owner.turn = turn
        for each in owner.lanes.values():
            each.set_turn(name, turn)

    def ahead_of(self, owner: str) -> int:
        """Return the jobs of ``owner``, and of each other at most one more."""
        known = self.owners.get(owner)
        return self.counts.jobs_up_to(1 if known is None else known.jobs + 1)

    def in_order(self, served: dict[str, int]) -> Iterator[Turn]:
        """Yield the jobs in order; ``served`` counts those that the plan served."""
        here: dict[str, int] = {}  # of these, the jobs of this priority
        heads: list[tuple[_Key, _Head]] = []

        def key_of(job: OpenJob) -> _Key:
            owner = job.job.owner
            has = self.shares.running.get(owner, 0) + served.get(owner, 0)
            turn = self.owners[owner].turn
            return has, here.get(owner, 0), turn, *place_of(job)

        def advance(cursor: _Cursor) -> None:
            for rank in cursor.ranks:
                cursor.last = rank
                owner = rank[2]
                jobs = iter(cursor.lane.jobs[owner])
                job = next(jobs)
                # The rank of an owner that was served is out of date: the next owner
                # may precede it.
                leads = owner not in served
                heapq.heappush(heads, (key_of(job), _Head(cursor, job, jobs, leads)))
                if leads:
                    return

        for lane in self.lanes.values():
            advance(_Cursor(lane, lane.ranks()))
        while heads:
            key, head = heapq.heappop(heads)
            cursor, job = head.cursor, head.job
            owner = job.job.owner
            if head.leads:
                advance(cursor)
                head.leads = False
            if cursor.only_for is not None and owner not in cursor.only_for:
                continue
            if owner in served and key != (now := key_of(job)):
                heapq.heappush(heads, (now, head))  # it was served in another lane
                continue
            turn = Turn(job)
            yield turn
            if turn.served:
                served[owner] = served.get(owner, 0) + 1
                here[owner] = here.get(owner, 0) + 1
            if turn.only_for is not None:
                cursor.restrict(turn.only_for)
            if (following := next(head.rest, None)) is not None:
                head.job = following
                heapq.heappush(heads, (key_of(following), head))


_Key: TypeAlias = tuple[int, int, int, int, int]
"""Orders jobs in a plan: those that the owner has running, those that it was served
before in this plan, its turn among equals, and the job's place among its own."""


class _Cursor(msgspec.Struct):
    """The owners of a lane, as a plan proceeds."""

    lane: Lane
    ranks: Iterator[Rank]
    only_for: Collection[str] | None = None
    last: Rank = (-1, -1, "")

    def restrict(self, owners: Collection[str]) -> None:
        """Continue with some of the owners only."""
        self.only_for = owners
        ranks = self.lane.ranks_of(owners)
        self.ranks = iter([rank for rank in ranks if rank > self.last])


class _Head(msgspec.Struct):
    """The next job of an owner in a lane.

    ``leads``: the owner that follows in the lane is not among the heads yet.
    """

    cursor: _Cursor
    job: OpenJob
    rest: Iterator[OpenJob]
    leads: bool
