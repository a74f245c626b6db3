"""What is done about a fact once it is in the store."""

from collections.abc import Callable, Iterable

from shoal.domain.facts import (
    AccountCredited,
    AccountLimited,
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    ReceiptPresented,
    WorkerConditioned,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerMarked,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.vocabulary import CancelJob, RunJob
from shoal.domain.work import BEYOND_TEXT, Call, Feature
from shoal.pool.react import Recall
from shoal.pool.state import Pool
from shoal.pool.stimuli import Spoiled, Stimulus
from shoal.runtime.answer import Answer, Spoilt
from shoal.runtime.blobs import Blobs
from shoal.runtime.ends import error_of
from shoal.runtime.named import Named
from shoal.runtime.peers import Peers
from shoal.runtime.watch import Watch


class Acting:
    """Tells workers and askers what was decided.

    When a fact is acted on, the pool is as all facts of its batch have left it.
    ``accept`` tells whoever submitted a job that it was accepted.
    """

    def __init__(
        self,
        pool: Pool,
        answers: dict[JobId, Answer],
        named: Named,
        peers: Peers,
        watch: Watch,
        blobs: Blobs,
        accept: Callable[[JobId], None],
        post: Callable[[Stimulus], None],
    ) -> None:
        self._pool = pool
        self._answers = answers
        self._named = named
        self._peers = peers
        self._watch = watch
        self._blobs = blobs
        self._accept = accept
        self._post = post

    def act(self, fact: Fact, recalled: Iterable[Recall]) -> None:
        """Do what follows from ``fact``, and stop those who work in vain."""
        match fact:
            case JobSubmitted(job):
                self._accept(job.id)
                self._watch.look(job.id)
            case JobLeased():
                self._lease(fact)
                self._watch.look(fact.job_id)
            case JobHedged():
                self._hedge(fact)
            case JobUnhedged(job_id, lease):
                self._answers[job_id].unhedge(lease)
                self._watch.look(job_id)
            case JobStarted() | JobRequeued():
                self._watch.look(fact.job_id)
            case JobCompleted(job_id, _, outcome):
                self._answers[job_id].finish(outcome)
                self.forget(job_id)
            case JobFailed() | JobCancelled() | JobExpired():
                self._answers[fact.job_id].fail(error_of(fact))
                self.forget(fact.job_id)
            case WorkerJoined(worker_id=worker_id):
                self._peers.entered(worker_id)
            case WorkerLost(worker_id=worker_id):
                self._peers.left(worker_id)
            case (
                WorkerDraining()
                | WorkerConditioned()
                | WorkerMarked()
                | WorkerTrusted()
                | AccountCredited()
                | AccountLimited()
                | ReceiptPresented()
                | CameLate()
            ):
                pass
        for worker_id, cancel in recalled:
            peer = self._peers.of(worker_id)
            if CancelJob in peer.accepts or self._keeps_lane(worker_id, cancel.job_id):
                peer.issue(cancel)

    def forget(self, job_id: JobId) -> None:
        """Let go of a job that is not open any more, or never was."""
        del self._answers[job_id]
        self._named.remove(job_id)
        self._watch.forget(job_id)
        self._blobs.unpin(job_id)

    def _keeps_lane(self, worker_id: WorkerId, job_id: JobId) -> bool:
        """Say whether a worker has a lane that is over, until it is told so.

        Lanes can be ended on every wire that has them, if calls cannot.
        """
        worker = self._pool.workers.get(worker_id)
        return worker is not None and job_id in worker.lanes

    def _lease(self, fact: JobLeased) -> None:
        job = self._pool.jobs[fact.job_id]
        features = self._pool.workers[fact.worker_id].offer.features
        continues = Feature.CONTINUE in features and not job.needs & BEYOND_TEXT
        answer = self._answers[fact.job_id]
        try:
            beginning = answer.grant(fact.lease, fact.worker_id, continues=continues)
        except Spoilt as spoilt:
            # Nobody was told to run it, so nobody is to stop.
            self._post(Spoiled(fact.job_id, str(spoilt), spoilt.lost, cut=False))
            return
        # If the worker has gone meanwhile, it does not hear this, and that it went is
        # in the mailbox.
        run = RunJob(fact.job_id, fact.lease, job.job.work, beginning, job.job.terms)
        peer = self._peers.of(fact.worker_id)
        if isinstance(job.job.work, Call):
            self._blobs.give(peer, job.job.work.blobs)
        peer.issue(run)
        answer.leased(peer)

    def _hedge(self, fact: JobHedged) -> None:
        # Also if the first worker has begun meanwhile: this one is stopped next, and a
        # wire that cannot cancel frees its slot only when the job ends there.
        self._answers[fact.job_id].hedge(fact.lease, fact.worker_id)
        job = self._pool.jobs[fact.job_id].job
        run = RunJob(fact.job_id, fact.lease, job.work, terms=job.terms)
        self._peers.of(fact.worker_id).issue(run)
