"""The state of the pool: workers, jobs and queues, changed only by facts."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from shoal.domain import facts
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.domain.job import Job, Privacy
from shoal.domain.outcome import Fault
from shoal.domain.work import MODEL_QUEUE, JobKind
from shoal.domain.worker import MemoryLoan, Suspension
from shoal.pool.beginnings import KnownBeginnings
from shoal.pool.context_limits import UNKNOWN_LENGTH
from shoal.pool.fair_shares import FairShares
from shoal.pool.gangs.open_gangs import Gangs
from shoal.pool.lifecycle import ENDED, JobState, after
from shoal.pool.models.orders import OpenOrders
from shoal.pool.open_job import NO_LEASE, HedgeLease, OpenJob
from shoal.pool.queue import JobQueue
from shoal.pool.roster import Roster
from shoal.pool.suspensions import Approvals, Suspensions, refusal_of
from shoal.pool.waking import Sleepers
from shoal.pool.worker import (
    FAILURES_MAX,
    REST_MAX,
    REST_MIN,
    CostLevel,
    Penalty,
    SpeedEstimates,
    Worker,
)

REFUSAL_PAUSE = 2.0  # seconds before a worker is offered a job again that it refused
PENALTY_SECONDS = 86_400.0  # seconds for which points stand against a worker
PENALTIES_MAX = 4096  # of all workers; beyond it the oldest are dropped
LOSS_GRACE = 3.0  # seconds for a lost worker to reconnect, which alone can go on
ANY_WORKER = WorkerId("")  # which of them has a call, is not known
RETURN_GRACE = 20.0  # seconds for a member's worker to reconnect, also from a pause
MEMBER_SETTLED = 60.0  # seconds of a lease, so that a reconnected worker was not lost
SESSIONS_MAX = 65_536  # sessions whose last worker is remembered


@dataclass(slots=True)
class PoolState:
    """Everything that scheduling depends on.  One writer, which calls ``apply``."""

    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    jobs: dict[JobId, OpenJob] = field(default_factory=dict)
    queues: dict[str, JobQueue] = field(default_factory=dict)
    """The jobs that wait, by model."""

    queues_made: int = 0  # since the start
    queued: int = 0  # jobs in all queues
    queued_by_owner: defaultdict[str, int] = field(
        default_factory=lambda: defaultdict(int)
    )
    """Jobs in all queues, by owner."""

    size: int = 0  # characters of all jobs
    sizes_by_owner: defaultdict[str, int] = field(
        default_factory=lambda: defaultdict(int)
    )
    """Characters of all jobs, by owner."""

    refusals: deque[tuple[float, JobId, WorkerId]] = field(default_factory=deque)
    """Refusals, with the time until which the worker is not offered the job again."""

    returns: list[tuple[float, int, JobId, WorkerId]] = field(default_factory=list)
    """A heap: until when jobs wait for their workers to reconnect, oldest first."""

    returns_made: int = 0  # how many were put into it
    sleepers: Sleepers = field(default_factory=Sleepers)

    awaiting: dict[WorkerId, list[JobId]] = field(default_factory=dict)
    """The jobs that are kept out of their queues until these workers reconnect."""

    rests: list[tuple[float, WorkerId]] = field(default_factory=list)
    """A heap: until when workers whose engines fail get no jobs."""

    roster: Roster = field(default_factory=Roster)
    shares: FairShares = field(default_factory=FairShares)
    """Jobs that are leased, by owner."""

    gangs: Gangs = field(default_factory=Gangs)
    without_output: dict[JobId, OpenJob] = field(default_factory=dict)
    """Jobs without output from their first worker, the longest silent first."""

    hedged: int = 0  # jobs with two leases
    sessions: dict[str, tuple[WorkerId, JobId]] = field(default_factory=dict)
    """The worker and the id of each session's last job, the oldest first."""

    resorting: dict[str, dict[JobId, OpenJob]] = field(default_factory=dict)
    """The waiting jobs that a hosted provider may get, by model."""

    last_resorts: int = 0  # workers of last resort
    beginnings: KnownBeginnings = field(default_factory=KnownBeginnings)
    speeds: SpeedEstimates = field(default_factory=SpeedEstimates)
    penalties: deque[Penalty] = field(default_factory=deque)
    """Points against workers, in the order in which they expire."""

    trusted_keys: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """Public keys of the workers that an owner's user trusts with private jobs."""

    suspensions: Suspensions = field(default_factory=Suspensions)
    approvals: Approvals = field(default_factory=Approvals)
    aliases: dict[str, facts.AliasSet] = field(default_factory=dict)
    """By name: see ``aliases``."""

    deployments: dict[str, facts.DeploymentSet] = field(default_factory=dict)
    """By model."""

    model_orders: OpenOrders = field(default_factory=OpenOrders)
    leaving: dict[WorkerId, str] = field(default_factory=dict)
    """The removed workers to disconnect, with the reasons."""

    @property
    def serving(self) -> Mapping[WorkerId, Worker]:
        """The workers for jobs of clients: not those that only load models."""
        libraries = self.roster.with_model.get(MODEL_QUEUE)
        if not libraries:
            return self.workers
        return {name: w for name, w in self.workers.items() if name not in libraries}

    def loan_of(self, peer: str) -> MemoryLoan | None:
        """Return how a machine takes part in models of several, if it does."""
        worker = self.workers.get(WorkerId(f"{peer}/{MODEL_QUEUE}"))
        library = None if worker is None else worker.offer.library
        return None if library is None else library.loan

    def shards_of(self, worker_id: WorkerId, model: str) -> tuple[str, ...]:
        """Return the machines that run a model together; none: the worker's does it."""
        loan = self.loan_of(peer_of(worker_id))
        group = None if loan is None else loan.group(model)
        machines = (each.machine for each in (group.shards if group else ()))
        return tuple(peer_of(WorkerId(each)) for each in machines)

    def cost(self, level: CostLevel) -> float:
        """Return the relative time that one more job would take at this level.

        Twice the pace makes up for twice the load; an unknown pace counts as the
        typical one.
        """
        load, step = level
        if step is None:
            usual = self.speeds.typical_pace
            step = 0 if usual is None else round(math.log2(usual))
        return math.ldexp(load, -step)

    def restore(
        self,
        job: Job,
        lease: LeaseNumber,
        queued_at: float,
        worker_id: WorkerId | None = None,
        run_since: LeaseNumber = NO_LEASE,
        *,
        submitted_at: float | None = None,
        grace_until: float = 0.0,
        return_until: float = 0.0,
        claim_until: float = 0.0,
        started: bool = False,
    ) -> None:
        """Put a job from the store back into the queue.

        It has no worker, and its earlier leases are void.  Workers may come back until
        ``grace_until``: ``worker_id``, too, its last worker, which may still run it
        ``run_since`` that lease.  A member of a gang waits so long for it; any other
        job ``return_until``, if that is given.  A call that no worker is known to have
        waits ``claim_until`` for one that has it (``OpenJob.may_have``).  It was
        submitted when it was queued, unless that is given.  ``started`` is as in
        ``OpenJob``.
        """
        self._open(job, queued_at, lease)
        opened = self.jobs[job.id]
        opened.grace_until = grace_until
        opened.started = started
        if submitted_at is not None:
            opened.submitted_at = submitted_at
        if worker_id is None:
            if claim_until and job.kind is JobKind.CALL and opened.gang is None:
                self._unqueue(opened)
                self._await_worker(opened, ANY_WORKER, claim_until)
            return
        if opened.gang is not None:
            self._await_return(opened, worker_id, max(queued_at, grace_until))
        elif opened.can_resume:
            opened.last_worker = worker_id
            opened.run_since = run_since
            if return_until:
                self._unqueue(opened)
                self._await_worker(opened, worker_id, return_until)

    def expire_penalties(
        self,
        now: float,
        renews: Callable[[OpenJob, WorkerId], bool] = lambda job, worker_id: False,
    ) -> float | None:
        """Drop the refusals, penalties and rests that have expired.

        ``renews``: whether the refusal of a job by a worker counts once more.  Jobs
        give up workers that have not reconnected in time.  Returns when to call this
        next.
        """
        while self.returns and self.returns[0][0] <= now:
            until, _, job_id, worker_id = heappop(self.returns)
            self._give_up_return(job_id, worker_id, until)
        while self.refusals and self.refusals[0][0] <= now:
            _, job_id, worker_id = self.refusals.popleft()
            if (job := self.jobs.get(job_id)) is None:
                continue
            if renews(job, worker_id):
                self.refusals.append((now + REFUSAL_PAUSE, job_id, worker_id))
            else:
                job.refused_by.pop(worker_id, None)
        while self.penalties and self.penalties[0].until <= now:
            self._drop_oldest_penalty()
        while self.rests and self.rests[0][0] <= now:
            until, worker_id = heappop(self.rests)
            worker = self.workers.get(worker_id)
            if worker is not None and worker.rests_until == until:
                self.roster.rest(worker, "")
        if not (self.refusals or self.rests or self.penalties or self.returns):
            return None  # as nearly always
        times = [until for until, _, _ in islice(self.refusals, 1)]
        times += [until for until, _ in self.rests[:1]]
        times += [mark.until for mark in islice(self.penalties, 1)]
        times += [until for until, *_ in self.returns[:1]]
        return min(times, default=None)

    def leases_of(self, worker_id: WorkerId) -> Iterator[tuple[OpenJob, LeaseNumber]]:
        """Yield the open jobs that the worker has a lease on, each with the lease."""
        for job_id, lease in self.workers[worker_id].leases.items():
            job = self.jobs.get(job_id)
            if job is not None and (worker_id, lease) in job.holders:
                yield job, lease

    def is_drained(self, worker_id: WorkerId) -> bool:
        """Return whether a worker that an operator drains has ended all its jobs."""
        draining = self.workers[worker_id].suspension is Suspension.DRAINING
        return draining and next(self.leases_of(worker_id), None) is None

    def workers_named(self, name: str) -> list[WorkerId]:
        """Return the connected workers of a name: a worker's, or a machine's."""
        return [each for each in self.workers if name in (each, peer_of(each))]

    def holder_of(self, job_id: JobId) -> Worker | None:
        """Return the worker of a job; None if it waits or has ended."""
        job = self.jobs.get(job_id)
        if job is None or job.worker_id is None:
            return None
        return self.workers[job.worker_id]

    def apply(self, fact: facts.Fact, now: float) -> None:
        """Apply a fact.

        Raises ImpossibleTransition if it cannot follow from the job's state.
        """
        match fact:
            case facts.JobSubmitted(job):
                assert job.id not in self.jobs, f"{job.id} submitted twice"
                self._open(job, now)
            case facts.JobLeased() | facts.JobStarted() | facts.JobRequeued():
                self._advance(fact, now)
            case facts.JobHedged():
                self._hedge(fact, now)
            case facts.JobUnhedged():
                self._unhedge(fact, now)
            case (
                facts.JobCompleted()
                | facts.JobFailed()
                | facts.JobCancelled()
                | facts.JobExpired()
            ):
                self._end(fact, now)
            case facts.LateResult(job_id=job_id, lease=lease, worker_id=worker_id):
                worker = self.workers.get(worker_id)
                if worker is not None and worker.leases.get(job_id) == lease:
                    self._free_slot(worker, job_id)
            case facts.WorkerJoined(worker_id, offer, cancels, shared, keeps_jobs):
                assert worker_id not in self.workers, f"{worker_id} joined twice"
                # What it goes on with is leased to it next.
                for job_id in self.awaiting.pop(worker_id, ()):
                    self._give_up_return(job_id, worker_id)
                worker = Worker(
                    worker_id, offer, cancels, shared, keeps_jobs, since=now, used=now
                )
                worker.suspension = self._suspension_of(worker)
                self.workers[worker_id] = worker
                self.sleepers.remove(worker_id)
                self.last_resorts += offer.last_resort is not None
                worker.points = sum(
                    mark.points for mark in self.penalties if mark.applies_to(worker)
                )
                self.roster.add(worker)
                if worker.suspension is not None:
                    self.suspensions.join(worker_id)
                    self._find_leaving([worker_id])
            case facts.WorkerMarked(worker_id, points, public_key=public_key):
                mark = Penalty(now + PENALTY_SECONDS, worker_id, public_key, points)
                self.penalties.append(mark)
                self._apply_penalty(mark, points)
                if len(self.penalties) > PENALTIES_MAX:
                    self._drop_oldest_penalty()
            case facts.WorkerTrusted(owner, user, public_key):
                self.trusted_keys.setdefault((owner, user), set()).add(public_key)
                self.roster.on_change()
            case facts.WorkerDistrusted(owner, user, public_key):
                # Waiting jobs hold the same set.
                self.trusted_keys.get((owner, user), set()).discard(public_key)
                self.roster.on_change()
            case (
                facts.ReceiptPresented()
                | facts.AccountCredited()
                | facts.AccountLimited()
            ):
                pass  # scheduling does not depend on it
            case facts.AliasSet(name):
                self.aliases[name] = fact
            case facts.AliasRemoved(name):
                del self.aliases[name]
            case facts.DeploymentSet(name):
                self.deployments[name] = fact
                self.roster.deploy(name, fact.hub, now)
            case facts.DeploymentRemoved(name):
                del self.deployments[name]
                self.roster.deploy(name, None, now)
            case facts.WorkerLoadChanged(worker_id, condition):
                self.roster.set_load(self.workers[worker_id], condition)
            case facts.MachineCalled(worker_id):
                sleeper = self.sleepers.by_id[worker_id]
                sleeper.calls, sleeper.called_at = sleeper.calls + 1, now
            case facts.WorkerDraining(worker_id, reason):
                self.roster.drain(self.workers[worker_id], reason or "draining")
            case facts.WorkerSuspended():
                order = self.suspensions.suspend(fact, self.workers, now)
                self._update_suspensions(order.workers)
            case facts.WorkerResumed():
                self._update_suspensions(self.suspensions.resume(fact))
            case facts.WorkerApproved():
                self.approvals.approve(fact)
                self._update_pending()
            case facts.WorkerDisapproved():
                self.approvals.disapprove(fact)
                self._update_pending()
            case facts.WorkerDismissed(worker_id):
                self.workers[worker_id].dismissed = True
                del self.leaving[worker_id]
            case facts.WorkerLeft(worker_id):
                self.leaving.pop(worker_id, None)
                self.suspensions.leave(worker_id)
                self.beginnings.forget(worker_id)
                gone = self.workers.pop(worker_id)
                self.sleepers.add(gone, gone.draining)
                self.last_resorts -= gone.offer.last_resort is not None
                for model in self.roster.remove(gone, now):
                    self.speeds.forget(model)

    # Jobs.

    def _advance(
        self, fact: facts.JobLeased | facts.JobStarted | facts.JobRequeued, now: float
    ) -> None:
        job = self.jobs[fact.job_id]
        begun = job.state is JobState.STREAMING
        job.state = after(job.state, fact)
        job.since = now
        match fact:
            case facts.JobLeased(worker_id=worker_id, lease=lease):
                self._unqueue(job)
                if job.gang is not None:
                    if job.settled and job.gang.returning.get(job.rank) == worker_id:
                        job.lost -= 1  # only the connection was
                    self.gangs.place(job.gang, job.rank, worker_id)
                resumed = fact.resumes > NO_LEASE
                if resumed and job.lost:
                    job.lost -= 1  # only the connection was
                self._grant(job, worker_id, lease, resumed=resumed)
                job.worker_id = worker_id
                job.last_worker = None
                if not resumed:
                    job.run_since = lease
                job.lease = lease
                job.leased_at = now
                self.shares.add(job.job.owner, 1)
                self._record_reading(job, worker_id)
                if not (job.started or job.lost):
                    self.without_output[job.job.id] = job
            case facts.JobStarted():
                assert job.hedge is None, f"{fact.job_id} has two workers"
                job.started = True
                self.without_output.pop(fact.job_id, None)
                self._record_success(job)
            case facts.JobRequeued(reason=reason, refused_by=refused_by):
                if begun or refused_by is None:
                    job.lost += not fact.handed_over
                    job.ran += now - job.leased_at
                    job.settled = now - job.leased_at >= MEMBER_SETTLED
                    job.queued_at = now
                if refused_by is not None and fact.too_long:
                    self._record_length(job, refused_by, reason)
                elif refused_by is not None:
                    self._record_refusal(job, refused_by, reason, now)
                before = job.worker_id
                if refused_by is None and not fact.handed_over and job.can_resume:
                    job.last_worker = before
                if fact.failed and before is not None:
                    self._record_failure(job, before, reason, now)
                self._end_leases(job, cut=fact.handed_over)
                if fact.awaited:
                    assert before is not None, "a worker was lost"
                    self._await_worker(job, before, now + LOSS_GRACE)
                else:
                    self._queue(job)
                if job.gang is not None:
                    self.gangs.queue(job.gang, job.rank)
                    if refused_by is None and not fact.handed_over:
                        assert before is not None, "a worker was lost"
                        self._await_return(job, before, now + RETURN_GRACE)

    def _hedge(self, fact: facts.JobHedged, now: float) -> None:
        job = self.jobs[fact.job_id]
        job.state = after(job.state, fact)
        assert job.hedge is None, f"{fact.job_id} has two workers already"
        self._grant(job, fact.worker_id, fact.lease)
        job.hedge = HedgeLease(fact.worker_id, fact.lease, now)
        self.hedged += 1
        del self.without_output[fact.job_id]

    def _unhedge(self, fact: facts.JobUnhedged, now: float) -> None:
        """End the lease of ``fact``; the job continues under the other."""
        job = self.jobs[fact.job_id]
        job.state = after(job.state, fact)
        assert job.hedge is not None, f"{fact.job_id} has one worker"
        assert job.worker_id is not None
        leaving, staying = job.worker_id, job.hedge
        if fact.lease == staying.lease:
            leaving = staying.worker_id
        else:
            assert fact.lease == job.lease, f"{fact.job_id} has no lease {fact.lease}"
            job.worker_id, job.lease = staying.worker_id, staying.lease
            job.since = job.leased_at = staying.since
            self._record_reading(job, staying.worker_id)
        job.hedge = None
        self.hedged -= 1
        if fact.lost:
            job.lost += 1
        elif fact.too_long:
            self._record_length(job, leaving, fact.reason)
        elif not fact.cut:
            self._record_refusal(job, leaving, fact.reason, now)
        if fact.failed:
            self._record_failure(job, leaving, fact.reason, now)
        self._end_lease(leaving, fact.job_id, cut=fact.cut)

    def _end(self, fact: facts.JobEnd, now: float) -> None:
        job = self.jobs.pop(fact.job_id)
        if (
            isinstance(fact, facts.JobFailed)
            and fact.fault is Fault.CONTEXT
            and job.state is JobState.LEASED
        ):
            assert job.worker_id is not None, f"{fact.job_id} has no worker"
            self._record_length(job, job.worker_id, fact.error)
        job.state = after(job.state, fact)
        assert job.state in ENDED
        self.size -= job.size
        _subtract(self.sizes_by_owner, job.job.owner, job.size)
        if job.gang is not None:
            self.gangs.end(job.gang, job.rank, job.state)
        if job.kind is JobKind.MODEL:
            self.model_orders.end(job.job, fact, now)
        if job.worker_id is None:
            self._unqueue(job)
            return
        if isinstance(fact, facts.JobCompleted):
            assert job.hedge is None, f"{fact.job_id} has two workers"
            worker = self.workers[job.worker_id]
            worker.used = now
            if worker.offer.last_resort is None:
                self.speeds.measure(job, worker, fact.outcome, now)
            self._record_success(job)
        if (
            isinstance(fact, facts.JobFailed)
            and not (fact.lost or fact.cut)
            and job.is_of_engine(fact.fault)
        ):
            self._record_failure(job, job.worker_id, fact.error, now)
        cut = isinstance(fact, (facts.JobCancelled, facts.JobExpired)) or (
            isinstance(fact, facts.JobFailed) and fact.cut
        )
        self._end_leases(job, cut=cut)

    def _drop_oldest_penalty(self) -> None:
        mark = self.penalties.popleft()
        self._apply_penalty(mark, -mark.points)

    def _apply_penalty(self, mark: Penalty, points: int) -> None:
        # Rare enough to examine all workers.
        self.roster.on_change()
        for worker in self.workers.values():
            if mark.applies_to(worker):
                worker.points += points

    def _open(self, job: Job, now: float, lease: LeaseNumber = NO_LEASE) -> None:
        trusted_keys: Set[str] | None = None
        if job.terms.privacy is Privacy.PRIVATE:
            # Without an entry the job fails at once, see ``react``.
            account = (job.owner, job.terms.user)
            trusted_keys = self.trusted_keys.get(account, frozenset())
        opened = OpenJob(
            *(job, now, now, now),
            lease=lease,
            last_lease=lease,
            trusted_keys=trusted_keys,
        )
        if (gang := job.terms.gang) is not None:
            opened.gang = self.gangs.add(
                job, gang, opened.requirement, begun=lease > NO_LEASE
            )
        self.jobs[job.id] = opened
        if job.kind is JobKind.MODEL:
            self.model_orders.open(job)
        self.size += opened.size
        self.sizes_by_owner[job.owner] += opened.size
        self._queue(opened)

    def _queue(self, job: OpenJob) -> None:
        queue = self.queues.get(job.model)
        if queue is None:
            self.queues_made += 1
            queue = JobQueue(self.shares, self.queues_made, since=job.queued_at)
            self.queues[job.model] = queue
            self.roster.want(job.model)
        queue.add(job)
        if job.job.terms.hosted_after is not None:
            self.resorting.setdefault(job.model, {})[job.job.id] = job
        self.queued += 1
        self.queued_by_owner[job.job.owner] += 1

    def _unqueue(self, job: OpenJob) -> None:
        if job.awaits is not None:
            job.awaits = None  # it is in no queue
            return
        queue = self.queues[job.model]
        queue.remove(job)
        if job.job.terms.hosted_after is not None:
            del self.resorting[job.model][job.job.id]
            if not self.resorting[job.model]:
                del self.resorting[job.model]
        if not queue:
            del self.queues[job.model]
            self.roster.end_want(job.model)
        self.queued -= 1
        _subtract(self.queued_by_owner, job.job.owner, 1)

    def _record_refusal(
        self, job: OpenJob, worker_id: WorkerId, reason: str, now: float
    ) -> None:
        job.refused_by[worker_id] = reason
        self.refusals.append((now + REFUSAL_PAUSE, job.job.id, worker_id))

    def _record_failure(
        self, job: OpenJob, worker_id: WorkerId, reason: str, now: float
    ) -> None:
        """Note that an engine failed: its worker rests after some in a row.

        Not the last one that takes jobs for the model: it says what is wrong at once.
        """
        job.failures.append((worker_id, reason))
        worker = self.workers[worker_id]
        if worker.resting:
            return  # the job began before the rest
        failures = worker.failures + 1
        others = self.roster.with_model.get(job.model, {}).values()
        rests = failures >= FAILURES_MAX
        if rests and not any(w.accepts_jobs for w in others if w is not worker):
            return
        worker.failures = failures
        if not rests:
            return
        trials = min(failures - FAILURES_MAX, 10)
        pause = min(REST_MAX, math.ldexp(REST_MIN, trials))
        worker.rests_until = now + pause
        heappush(self.rests, (worker.rests_until, worker_id))
        self.roster.rest(worker, f"its engine keeps failing: {reason}")

    def _record_success(self, job: OpenJob) -> None:
        assert job.worker_id is not None, f"{job.job.id} has no worker"
        worker = self.workers[job.worker_id]
        if worker.failures:
            worker.failures = 0
            self.roster.rest(worker, "")

    def _record_length(self, job: OpenJob, worker_id: WorkerId, reason: str) -> None:
        """Note that a worker refused a job for its length, and what it shows."""
        worker, key = self.workers[worker_id], job.context_key
        # The text so far is part of the length, and not of the request.
        length = UNKNOWN_LENGTH if job.started else job.length
        self.roster.learn_context(worker, key, length, reason)
        job.too_long_for[worker_id] = reason
        if context := worker.context_of(key):
            job.tokens_min = max(job.tokens_min, context + 1)

    def _await_worker(self, job: OpenJob, worker_id: WorkerId, until: float) -> None:
        """Keep a job out of its queue until its worker reconnects, or time is up."""
        job.awaits, job.awaits_until = worker_id, until
        self.awaiting.setdefault(worker_id, []).append(job.job.id)
        self._expect_return(job.job.id, worker_id, until)

    def _await_return(self, job: OpenJob, worker_id: WorkerId, until: float) -> None:
        """Keep a gang's member for its worker, which may still run it, for a while."""
        assert job.gang is not None, "only members of gangs wait"
        self.gangs.queue(job.gang, job.rank, worker_id)
        self._expect_return(job.job.id, worker_id, until)

    def _expect_return(self, job_id: JobId, worker_id: WorkerId, until: float) -> None:
        self.returns_made += 1
        heappush(self.returns, (until, self.returns_made, job_id, worker_id))

    def _give_up_return(
        self, job_id: JobId, worker_id: WorkerId, until: float = math.inf
    ) -> None:
        if (job := self.jobs.get(job_id)) is None:
            return
        if job.awaits == worker_id and job.awaits_until <= until:  # not once more since
            self.awaiting.pop(worker_id, None)
            job.awaits = None
            self._queue(job)
        gang = job.gang
        if gang is not None and gang.returning.get(job.rank) == worker_id:
            del gang.returning[job.rank]

    def _record_reading(self, job: OpenJob, worker_id: WorkerId) -> None:
        """Note which worker has a job's session, and the beginning of its chat."""
        if self.workers[worker_id].offer.last_resort is not None:
            return  # the next job is for a machine of the pool again
        # With one worker, nothing depends on it.
        if len(self.roster.with_model.get(job.model, ())) > 1:
            self.beginnings.record(worker_id, job.beginnings)
        session = job.job.session
        if not session:
            return
        self.sessions.pop(session, None)  # put at the end again
        self.sessions[session] = (worker_id, job.job.id)
        if len(self.sessions) > SESSIONS_MAX:
            del self.sessions[next(iter(self.sessions))]

    # Leases.

    def _grant(
        self,
        job: OpenJob,
        worker_id: WorkerId,
        lease: LeaseNumber,
        *,
        resumed: bool = False,
    ) -> None:
        worker = self.workers[worker_id]
        slots = 1 if job.gang is None else worker.slots_of_member(job.gang.slots)
        # A job that runs on has its slot, though the worker may offer fewer now.
        free = resumed or worker.free_slots >= slots
        assert free, f"{worker_id} has no free slot for it"
        assert job.job.id not in worker.leases, f"{worker_id} still has {job.job.id}"
        worker.leases[job.job.id] = lease
        worker.used = job.since
        if job.kind is JobKind.CALL_STREAM:
            worker.streams.add(job.job.id)
        if job.gang is not None:
            worker.add_member(job.job.id, slots)
        job.last_lease = lease
        self.roster.index(worker)

    def _end_leases(self, job: OpenJob, *, cut: bool) -> None:
        """End all leases on a job."""
        self.shares.add(job.job.owner, -1)
        self.without_output.pop(job.job.id, None)
        for worker_id, _ in job.holders:
            self._end_lease(worker_id, job.job.id, cut=cut)
        if job.hedge is not None:
            job.hedge = None
            self.hedged -= 1
        job.worker_id = None

    def _end_lease(self, worker_id: WorkerId, job_id: JobId, *, cut: bool) -> None:
        worker = self.workers[worker_id]
        if cut and not worker.cancels:
            # It cannot be cancelled, so its slot stays taken until it answers or
            # disconnects.
            return
        self._free_slot(worker, job_id)

    def _find_leaving(self, workers: Iterable[WorkerId]) -> None:
        """Find out which workers the orders in force disconnect."""
        for worker_id in workers:
            worker = self.workers[worker_id]
            self.leaving.pop(worker_id, None)  # a milder order may have replaced one
            for order in self.suspensions.about(worker_id):
                if not worker.dismissed and order.disconnects(
                    worker_id, shared=worker.shared
                ):
                    self.leaving[worker_id] = refusal_of(order)

    def _suspension_of(self, worker: Worker) -> Suspension | None:
        suspension = self.suspensions.of(worker.id)
        if suspension is None and self.approvals.is_pending(
            worker.id, worker.offer.proven_key
        ):
            return Suspension.PENDING
        return suspension

    def _update_pending(self) -> None:
        # Rare enough to examine all workers.
        for worker in self.workers.values():
            suspension = self._suspension_of(worker)
            if suspension is not worker.suspension:
                self.roster.suspend(worker, suspension)

    def _update_suspensions(self, workers: Collection[WorkerId]) -> None:
        for worker_id in workers:
            worker = self.workers[worker_id]
            self.roster.suspend(worker, self._suspension_of(worker))
        self._find_leaving(workers)

    def _free_slot(self, worker: Worker, job_id: JobId) -> None:
        del worker.leases[job_id]
        worker.streams.discard(job_id)
        if worker.members:
            worker.remove_member(job_id)
        self.roster.index(worker)


def _subtract(counts: defaultdict[str, int], key: str, less: int) -> None:
    """Take from a count; one of 0 is dropped, for clients choose the keys."""
    # No Counter: it looks for missing keys, and deletes, by functions of Python.
    counts[key] -= less
    if not counts[key]:
        del counts[key]
