"""The plan as its words say it: every waiting job is examined, whoever is free."""

from collections import Counter
from collections.abc import Iterator

from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobSubmitted,
)
from shoal.domain.ids import JobId
from shoal.pool.free_workers import FreeWorkers, PromisedSlots
from shoal.pool.open_job import OpenJob
from shoal.pool.queue import OVERTAKEN_BY_MAX
from shoal.pool.state import PoolState


class ReferencePlan:
    """The waiting jobs of a pool in the order of their arrival.

    ``served`` is when each owner of a model and priority was last served, or came.
    """

    def __init__(self) -> None:
        self.waiting: dict[JobId, tuple[int, int]] = {}  # with their places
        self.models: dict[str, None] = {}
        self.served: dict[tuple[object, ...], int] = {}
        self._times = 0
        self._arrivals = Counter[str]()
        self._base: dict[JobId, int] = {}  # the rounds of waiting jobs
        self._rounds: dict[tuple[object, str], int] = {}  # the last ones of users

    def apply(self, fact: Fact, pool: PoolState) -> None:
        """Follow a fact that was not applied to ``pool`` yet."""
        match fact:
            case JobSubmitted(job):
                self._add(OpenJob(job, 0.0, 0.0, 0.0), pool)
            case JobRequeued(job_id):
                self._add(pool.jobs[job_id], pool)
            case (
                JobLeased(job_id)
                | JobCompleted(job_id)
                | JobFailed(job_id)
                | JobCancelled(job_id)
                | JobExpired(job_id)
            ):
                if job_id in self.waiting:
                    del self.waiting[job_id]
                    removed = pool.jobs[job_id]
                    self._touch(removed)
                    if not self._jobs(removed.model, pool):
                        del self.models[removed.model]
            case _:
                pass

    def plan(self, pool: PoolState) -> list[tuple[JobId, str, str]]:
        """Return the leases: job, worker and reason."""
        promised = PromisedSlots()
        return [
            lease
            for model in self.models
            for lease in self._plan_of(model, pool, promised)
        ]

    def _plan_of(
        self, model: str, pool: PoolState, promised: PromisedSlots
    ) -> Iterator[tuple[JobId, str, str]]:
        free = FreeWorkers(pool, model, promised)
        jobs = self._jobs(model, pool)
        total: Counter[str] = Counter()
        here: Counter[object] = Counter()

        def rank(job: OpenJob) -> tuple[float, ...]:
            if job.lease:
                return (-1000,)
            group = self._group(job)
            running = pool.shares.running.get(job.job.owner, 0) + total[job.job.owner]
            served = self.served[group]
            place = self.waiting[job.job.id]
            return -job.job.priority.value, running, here[group], served, *place

        while jobs and free:
            job = min(jobs, key=rank)  # of equals the first, which came first
            jobs.remove(job)
            if (choice := free.assign(job)) is not None:
                total[job.job.owner] += 1
                here[self._group(job)] += not job.lease
                yield job.job.id, choice[0].id, choice[1]

    def _add(self, job: OpenJob, pool: PoolState) -> None:
        group, user = self._group(job), job.job.terms.end_user
        others = [
            each
            for each in self._jobs(job.model, pool)
            if self._group(each) == group and not each.lease
        ]
        self._arrivals[job.model] += 1
        round_ = 0
        if any(each.job.terms.end_user == user for each in others):
            round_ = self._rounds[group, user] + 1
        elif others:
            round_ = min(self._base[each.job.id] for each in others)
        if not job.lease:
            self._rounds[group, user] = self._base[job.job.id] = round_
        overtaken_by = OVERTAKEN_BY_MAX + 1 if job.job.terms.whole else 0
        place = round_ + overtaken_by, self._arrivals[job.model]
        self.waiting[job.job.id] = place
        self.models.setdefault(job.model, None)
        if not (others or job.lease):
            self._touch(job)

    def _touch(self, job: OpenJob) -> None:
        if not job.lease:
            self._times += 1
            self.served[self._group(job)] = self._times

    def _jobs(self, model: str, pool: PoolState) -> list[OpenJob]:
        jobs = [pool.jobs[each] for each in self.waiting]
        return [each for each in jobs if each.model == model]

    @staticmethod
    def _group(job: OpenJob) -> tuple[object, ...]:
        return job.model, job.job.priority, job.job.owner
