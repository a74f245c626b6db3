"""Carries out what follows from a fact once it is stored, and enforces time limits."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.coordinator.answer import Answer, UnusableOutput
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.call_grants import CallGrants
from shoal.coordinator.connections import WorkerConnections
from shoal.coordinator.open_answers import OpenAnswers, error_of
from shoal.domain import facts
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.domain.job import Job, TimeLimit
from shoal.domain.trace_context import attempt_traceparent
from shoal.domain.work import INDIVISIBLE_FEATURES, Call, Feature, is_repeatable
from shoal.domain.worker import Suspension
from shoal.pool.eligibility import unsuitability
from shoal.pool.inputs import AnswerRejected, HubInput, LeaseResult, LimitReached
from shoal.pool.open_job import NO_LEASE, OpenJob
from shoal.pool.react import Revocation, next_limit
from shoal.pool.state import PoolState
from shoal.transports.clock import Clock, Timer

log = logging.getLogger("shoal.coordinator")


@dataclass(slots=True, eq=False)
class Deadlines:
    """A timer for each open job, set to the limit that it may reach next."""

    _pool: PoolState
    _answers: Mapping[JobId, Answer]
    _clock: Clock
    _post: Callable[[HubInput], None]
    # The due times, and the timers.
    _timers: dict[JobId, tuple[float, Timer]] = field(default_factory=dict)

    def check(self, job_id: JobId) -> None:
        """Check a job's limits now, and again when the next may be reached."""
        job = self._pool.jobs.get(job_id)
        if job is None:
            self.forget(job_id)
            return
        answer = self._answers[job_id]
        # While a new lease is being stored, the answer has the previous one.
        hedged = job.hedge and job.hedge.lease
        current = job.worker_id and answer.lease in (job.lease, hedged)
        last_output = answer.last_output if current else None
        due = next_limit(self._pool, job, self._clock.now(), last_output)
        if isinstance(due, TimeLimit):
            self.forget(job_id)
            self._post(LimitReached(job_id, due))
            return
        if (earlier := self._timers.get(job_id)) is not None:
            if earlier[0] <= due:
                return  # rescheduled when it fires: most jobs end before
            earlier[1].cancel()
        timer = self._clock.call_at(due, lambda: self._fire(job_id))
        self._timers[job_id] = (due, timer)

    def forget(self, job_id: JobId) -> None:
        """Cancel a job's timer."""
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer[1].cancel()

    def _fire(self, job_id: JobId) -> None:
        del self._timers[job_id]
        self.check(job_id)

    def stop(self) -> None:
        """Cancel all timers."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


@dataclass(slots=True, eq=False)
class Effects:
    """Sends workers their commands and clients their results.

    ``traced``: each attempt at a traced job is a span of its own, the parent of the
    worker's.  Else workers continue the client's span.  ``hedges``: two workers may
    run a job, and the first output wins.

    Effects follow a whole batch: the pool is as all facts of the batch have left it.
    """

    _pool: PoolState
    _answers: OpenAnswers
    _connections: WorkerConnections
    _deadlines: Deadlines
    _blobs: BlobTransfer
    _grants: CallGrants
    _post: Callable[[HubInput], None]
    _is_carried: Callable[[JobId], bool]
    _traced: bool
    _hedges: bool

    def apply(self, fact: facts.Fact, revoked: Iterable[Revocation]) -> None:
        """Carry out ``fact``, and cancel revoked leases at their workers."""
        match fact:
            case facts.JobSubmitted(job):
                self._answers.resolve(job.id)
                opened = self._pool.jobs.get(job.id)
                if opened is not None and opened.worker_id is None:
                    self._deadlines.check(job.id)  # else with its lease, or end
            case facts.JobLeased():
                self.lease(fact)
            case facts.JobHedged():
                self._hedge(fact)
            case facts.JobUnhedged(job_id, lease):
                self._answers[job_id].unhedge(lease)
                self._deadlines.check(job_id)
            case facts.JobStarted(job_id):
                self._deadlines.check(job_id)
            case facts.JobRequeued(job_id):
                self._answers[job_id].requeue()
                self._deadlines.check(job_id)
            case facts.JobCompleted(job_id, _, outcome):
                self._answers[job_id].finish(outcome)
                self.forget(job_id)
            case facts.JobFailed() | facts.JobCancelled() | facts.JobExpired():
                self._answers[fact.job_id].finish(error_of(fact))
                self.forget(fact.job_id)
            case facts.WorkerJoined(worker_id=worker_id):
                running = self._connections.on_worker_joined(worker_id)
                self._note_pending(worker_id)
                self._stop_others(worker_id, running)
            case facts.WorkerLeft(worker_id=worker_id):
                self._connections.on_worker_left(worker_id)
            case facts.MachineCalled(_, addresses, callers):
                for each in callers:
                    peer = self._connections.connection_of(each)
                    if words.WakeMachine in peer.accepts:
                        peer.send(words.WakeMachine(addresses))
            case facts.WorkerDismissed(worker_id, reason):
                self._connections.dismiss(worker_id, reason)
            case (
                facts.WorkerDraining()
                | facts.WorkerSuspended()
                | facts.WorkerResumed()
                | facts.WorkerApproved()
                | facts.WorkerDisapproved()
                | facts.WorkerLoadChanged()
                | facts.WorkerMarked()
                | facts.WorkerTrusted()
                | facts.WorkerDistrusted()
                | facts.AccountCredited()
                | facts.AccountLimited()
                | facts.AliasSet()
                | facts.AliasRemoved()
                | facts.DeploymentSet()
                | facts.DeploymentRemoved()
                | facts.ReceiptPresented()
                | facts.LateResult()
            ):
                pass
        for worker_id, cancel in revoked:
            peer = self._connections.connection_of(worker_id)
            if words.CancelJob in peer.accepts or self._holds_stream(
                worker_id, cancel.job_id
            ):
                peer.send(cancel)

    def _note_pending(self, worker_id: WorkerId) -> None:
        worker = self._pool.workers.get(worker_id)  # it may have left again
        if worker is not None and worker.suspension is Suspension.PENDING:
            log.info("pending worker=%r: see `shoal nodes approve --help`", worker_id)

    def _stop_others(self, worker_id: WorkerId, running: words.RunningJobNames) -> None:
        """Stop jobs that a worker still runs, and that are over or another's now."""
        for job_id, lease in running:
            job = self._pool.jobs.get(job_id)
            if job is None and self._is_carried(job_id):
                continue  # with its stream, if that is still the worker's
            if job is not None:
                # Another model of its machine may have the job, or joins as well.
                if peer_of(worker_id) in map(peer_of, dict(job.holders)):
                    continue
                if job.last_worker != worker_id and job.last_worker is not None:
                    continue
            self._stop(worker_id, job_id, lease)

    def _stop(self, worker_id: WorkerId, job_id: JobId, lease: LeaseNumber) -> None:
        """Stop a job that a worker has run on, under the lease that it knows."""
        if worker_id in self._pool.workers:  # else it has left again
            peer = self._connections.connection_of(worker_id)
            peer.send(words.CancelJob(job_id, lease))

    def forget(self, job_id: JobId) -> None:
        """Release the resources of a job that has ended or was rejected."""
        self._answers.close(job_id)
        self._deadlines.forget(job_id)

    def _holds_stream(self, worker_id: WorkerId, job_id: JobId) -> bool:
        """Say whether a worker holds a call stream that has ended.

        Every wire with call streams can end them, even one that cannot cancel calls.
        """
        worker = self._pool.workers.get(worker_id)
        return worker is not None and job_id in worker.streams

    def lease(self, fact: facts.JobLeased) -> None:
        """Give a worker the job, or let it go on with the one that it still runs.

        The latter may have ended since, by a later fact of the batch.
        """
        job = self._pool.jobs.get(fact.job_id)
        if job is None or (fact.worker_id, fact.lease) not in job.holders:
            assert fact.resumes, "other leases are the last facts of their batch"
            self._stop(fact.worker_id, fact.job_id, fact.resumes)
            return
        self._lease(fact)
        self._deadlines.check(fact.job_id)

    def _lease(self, fact: facts.JobLeased) -> None:
        job = self._pool.jobs[fact.job_id]
        features = self._pool.workers[fact.worker_id].offer.features
        resumes = fact.resumes > NO_LEASE
        continues = resumes or (
            Feature.CONTINUE in features and not job.needs & INDIVISIBLE_FEATURES
        )
        answer = self._answers[fact.job_id]
        try:
            beginning = answer.grant(
                *(fact.lease, fact.worker_id),
                continues=continues,
                repeats=is_repeatable(job.job.work),
                resumes=resumes,
            )
        except UnusableOutput as spoilt:
            # No worker got the job, so none has to stop but one that has it.
            if resumes:
                self._stop(fact.worker_id, fact.job_id, fact.resumes)
            if not continues and self._can_be_continued(job):
                refusal = words.Rejected(
                    fact.job_id, fact.lease, "cannot continue the answer"
                )
                self._post(LeaseResult(fact.worker_id, refusal))
            else:
                self._post(
                    AnswerRejected(fact.job_id, str(spoilt), spoilt.lost, cut=False)
                )
            return
        # If the worker has disconnected meanwhile, this is lost, and the disconnect is
        # in the mailbox.
        run = words.RunJob(
            *(fact.job_id, fact.lease, job.job.work, beginning),
            thoughts=answer.thoughts if continues else "",
            terms=job.job.terms,
            waited=job.waited(job.leased_at),
            remaining=job.remaining(job.leased_at),
            trace=job.job.terms.trace and self._trace(job.job, fact.lease),
            grant=self._grants.issue(fact.job_id, fact.lease, job.job.work),
            resumes=fact.resumes,
            text=answer.route(resumes=resumes, alone=not self._hedges),
        )
        peer = self._connections.connection_of(fact.worker_id)
        if isinstance(job.job.work, Call) and not resumes:
            self._blobs.send(peer, job.job.work.blobs)
        peer.send(run)
        answer.notify_leased(peer)

    def _can_be_continued(self, job: OpenJob) -> bool:
        """Return whether a worker that is busy now could continue an answer."""
        return not job.needs & INDIVISIBLE_FEATURES and any(
            Feature.CONTINUE in worker.offer.features
            and unsuitability(job, worker) is None
            and worker.id not in job.refused_by
            for worker in self._pool.workers.values()
        )

    def _hedge(self, fact: facts.JobHedged) -> None:
        # Also if the first worker has begun meanwhile: this one is stopped next, and a
        # wire that cannot cancel frees its slot only when the job ends there.
        self._answers[fact.job_id].hedge(fact.lease, fact.worker_id)
        job = self._pool.jobs[fact.job_id]
        since = job.leased_at if job.hedge is None else job.hedge.since
        run = words.RunJob(
            *(fact.job_id, fact.lease, job.job.work),
            terms=job.job.terms,
            waited=job.waited(since),
            remaining=job.remaining(since),
            trace=job.job.terms.trace and self._trace(job.job, fact.lease),
            grant=self._grants.issue(fact.job_id, fact.lease, job.job.work),
        )
        self._connections.connection_of(fact.worker_id).send(run)

    def _trace(self, job: Job, lease: LeaseNumber) -> str:
        parent = job.terms.trace
        return attempt_traceparent(parent, job.id, lease) if self._traced else parent
