"""The waiting jobs of one model, in the order of service."""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.domain.ids import JobId
from shoal.domain.job import Priority
from shoal.pool.open_job import OpenJob

PRIORITY_ORDER = tuple(sorted(Priority, key=lambda each: -each.value))


@dataclass(slots=True)
class JobQueue:
    """The waiting jobs of one model.

    Requeued jobs, which have waited their turn once, go first.  The others
    go by priority, and within one priority the owners with the fewest jobs running go
    first (max-min fair sharing), each with its oldest job.
    """

    requeued: dict[JobId, OpenJob] = field(default_factory=dict)
    fresh: dict[Priority, dict[str, dict[JobId, OpenJob]]] = field(default_factory=dict)
    """By priority and owner; owners in the order in which they were last served."""

    def __bool__(self) -> bool:
        return bool(self.requeued or self.fresh)

    def __len__(self) -> int:
        return len(self.requeued) + sum(
            len(jobs) for owners in self.fresh.values() for jobs in owners.values()
        )

    def add(self, job: OpenJob) -> None:
        """Add a job."""
        if job.lease:
            self.requeued[job.job.id] = job
            return
        owners = self.fresh.setdefault(job.job.priority, {})
        owners.setdefault(job.job.owner, {})[job.job.id] = job

    def remove(self, job: OpenJob) -> None:
        """Remove a job; its owner then comes after the others."""
        if self.requeued.pop(job.job.id, None) is not None:
            return
        owners = self.fresh[job.job.priority]
        jobs = owners.pop(job.job.owner)
        del jobs[job.job.id]
        if jobs:
            owners[job.job.owner] = jobs
        elif not owners:
            del self.fresh[job.job.priority]

    def in_order(
        self, running: Mapping[str, int]
    ) -> Iterator[tuple[OpenJob, "Served"]]:
        """Yield the jobs in the order in which they should be served.

        ``running`` is how many jobs each owner has running.  Call the ``Served`` that
        comes with a job if it was served: its owner's next job counts from there.
        """
        served: Counter[str] = Counter()
        for job in self.requeued.values():
            yield job, Served(served, job.job.owner)
        for priority in PRIORITY_ORDER:
            yield from self._fairly(self.fresh.get(priority, {}), running, served)

    def ahead_of(self, owner: str, priority: Priority) -> int:
        """Return how many jobs are served before a new one of ``owner``, about.

        Of the same priority, as many of each other owner's as of its own.
        """
        ahead = len(self.requeued)
        for each, owners in self.fresh.items():
            if each.value > priority.value:
                ahead += sum(map(len, owners.values()))
        same = self.fresh.get(priority, {})
        own = len(same.get(owner, ()))
        others = (len(jobs) for other, jobs in same.items() if other != owner)
        return ahead + own + sum(min(count, own + 1) for count in others)

    @staticmethod
    def _fairly(
        owners: Mapping[str, Mapping[JobId, OpenJob]],
        running: Mapping[str, int],
        served: Counter[str],
    ) -> Iterator[tuple[OpenJob, "Served"]]:
        jobs = {owner: iter(theirs.values()) for owner, theirs in owners.items()}
        turns = [
            (running.get(owner, 0) + served[owner], turn, owner)
            for turn, owner in enumerate(owners)
        ]
        heapq.heapify(turns)
        while turns:
            _, turn, owner = heapq.heappop(turns)
            job = next(jobs[owner], None)
            if job is None:
                continue
            yield job, Served(served, owner)
            has = running.get(owner, 0) + served[owner]
            heapq.heappush(turns, (has, turn + len(owners), owner))


@dataclass(frozen=True, slots=True)
class Served:
    """Counts a job as served when called."""

    counts: Counter[str]
    owner: str

    def __call__(self) -> None:
        self.counts[self.owner] += 1
