"""One task that owns the pool: stimulus → facts → store → actions."""

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import TypeAlias

from shoal.domain.errors import (
    Cancelled,
    JobError,
    NoWorker,
    QueueFull,
    ShoalError,
    ShuttingDown,
    StoreError,
    TimedOut,
    UnknownModel,
    WorkerLost,
)
from shoal.domain.facts import (
    CameLate,
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
)
from shoal.domain.facts import WorkerLost as WorkerLostFact
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Draining,
    Event,
    Failed,
    Joined,
    Progress,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Feature, Job, Limit, Limits
from shoal.pool.lifecycle import JobState
from shoal.pool.plan import plan
from shoal.pool.react import (
    Answered,
    Arrived,
    Began,
    Departed,
    Overdue,
    Retiring,
    Spoiled,
    Stimulus,
    Submitted,
    Withdrawn,
    overdue,
    react,
)
from shoal.pool.state import Pool
from shoal.runtime.answer import Answer, Reader, Slow, Spoilt
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.fact_log import log_fact
from shoal.runtime.peers import Connection, Peer, Peers
from shoal.store.port import Store

QUEUE_MAX = 1000  # jobs that may wait; more are refused so that no wait is hopeless
MODELS_SINCE = 86_400.0  # seconds: models of the last day may come back after a restart
RESTART_GRACE = 120.0  # seconds for workers to come back after a restart
DEFAULT_LIMITS = Limits()
NEAR_AMONG = 100  # models that a wrong name is compared with, which takes time
GOING_AWAY = 1001  # WebSocket close code (RFC 6455, section 7.4.1)

Holder: TypeAlias = tuple[WorkerId, LeaseNumber]

log = logging.getLogger("shoal.hub")


class Hub:
    """The coordinator's centre.

    Other tasks submit jobs, withdraw them and report what workers say; ``run`` does
    the rest.  Nothing is acted on before it is in the store.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        new_id: Callable[[], JobId],
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self.pool = Pool()
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._queue_max = queue_max
        self._mailbox: list[Stimulus] = []
        self._wake = asyncio.Event()
        self._accepting: dict[JobId, asyncio.Future[None]] = {}
        self._answers: dict[JobId, Answer] = {}
        self._timers: dict[JobId, Timer] = {}
        self._forgiving: Timer | None = None
        self._peers = Peers()
        self._idle = asyncio.Event()  # set while no job is open
        self._idle.set()
        self._stopping = False
        self._broken: StoreError | None = None

    # For those who want work done.

    @asynccontextmanager
    async def answering(
        self, work: Chat, limits: Limits = DEFAULT_LIMITS, owner: str = ""
    ) -> AsyncIterator[Reader]:
        """Have ``work`` done for the length of the block; leaving early cancels it.

        However the block ends, by return, disconnect or error, no worker is left
        working for a client that has gone.

        Raises UnknownModel, QueueFull, ShuttingDown or StoreError before the job is
        accepted.
        """
        self._admit(work)
        job = Job(self._new_id(), work, limits, owner)
        accepted = asyncio.get_running_loop().create_future()
        answer = Answer(job.id)
        self._accepting[job.id] = accepted
        self._answers[job.id] = answer
        self._count()
        self._post(Submitted(job))
        try:
            await accepted
            yield answer
        finally:
            if not answer.ended:
                self._post(Withdrawn(job.id, "the client left"))

    def withdraw(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; say whether there was one."""
        if job_id not in self._answers:
            return False
        self._post(Withdrawn(job_id, reason))
        return True

    @property
    def ready(self) -> str | None:
        """Say why jobs are not taken, or None if they are."""
        if self._broken is not None:
            return str(self._broken)
        return "stopping" if self._stopping else None

    # For those who speak with workers.

    def connect(self, peer: Peer, wire: str) -> "Port":
        """Take note of a connection; its events and its end go to what is returned."""
        return Port(self, Connection(peer, wire))

    # For whoever owns the hub.

    async def restore(self) -> int:
        """Take up the jobs that were open when the last coordinator ended."""
        stored = await self._store.open_jobs()
        given_out = [
            JobRequeued(each.job.id, each.lease, "the coordinator restarted")
            for each in stored
            if each.state is not JobState.QUEUED
        ]
        await self._store.append(given_out, self._clock.wall())
        now = self._clock.now()
        recently = self._clock.wall() - MODELS_SINCE
        for model in await self._store.models(recently):
            self.pool.expect(model, now)
        for each in stored:
            # Its client is gone, but nobody withdrew it: it is done all the same, and
            # the result can be asked for.
            self.pool.reopen(each.job, each.lease, now + RESTART_GRACE)
            self._answers[each.job.id] = Answer(each.job.id, attended=False)
            self._watch(each.job.id)
        self._count()
        return len(stored)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._mailbox = self._mailbox, []
            facts = self._decide(batch)
            if not facts:
                self._count()
                continue
            try:
                await self._store.append(
                    [fact for fact, _ in facts], self._clock.wall()
                )
            except StoreError as error:
                self._break(error)
                return
            for fact, holder in facts:
                log_fact(fact)
                self._act(fact, holder)
            self._count()

    async def drain(self) -> None:
        """Take no new jobs, and wait until those that are open have ended."""
        self._stopping = True
        await self._idle.wait()

    def hang_up_all(self, reason: str) -> None:
        """End every worker's connection; they may come back."""
        for peer in self._peers:
            peer.hang_up(reason, GOING_AWAY, reason)

    # Stimuli.

    def _post(self, stimulus: Stimulus) -> None:
        # Not bounded here, for everything that posts is: clients by the queue,
        # workers by one joining each and a few words for each lease.
        if self._broken is None:
            self._mailbox.append(stimulus)
            self._wake.set()

    def _admit(self, work: Chat) -> None:
        if self._broken is not None:
            raise self._broken
        if self._stopping:
            raise ShuttingDown("the coordinator is stopping: try again shortly")
        if not self.pool.knows(work.model, self._clock.now()):
            raise UnknownModel(self._unknown(work.model))

    def _unknown(self, model: str) -> str:
        models = sorted(islice(self.pool.with_model, NEAR_AMONG))
        if not models:
            return f"no worker has the model {model}: no worker has joined yet"
        near = difflib.get_close_matches(model, models, n=3, cutoff=0.5)
        known = (
            f"did you mean {' or '.join(near)}?" if near else f"there is {models[0]}"
        )
        return f"no worker has the model {model}: {known}"

    def _heard(self, connection: Connection, event: Event) -> None:
        if isinstance(event, Progress):
            self._progress(event)
            return
        if isinstance(event, Joined):
            self._gone(connection, "joined anew")
            worker_id = self._peers.join(connection, event.name)
            cancels = CancelJob in connection.peer.accepts
            self._post(Arrived(worker_id, event.offer, cancels))
            return
        speaker = self._peers.speaker(connection)
        if speaker is None:
            return  # replaced by a newer connection, and not gone yet
        match event:
            case Completed():
                self._completed(speaker, event)
            case Rejected() | Failed():
                self._post(Answered(speaker, event))
            case Draining():
                self._post(Retiring(speaker, event))

    def _progress(self, event: Progress) -> None:
        # The path of every token: no task, no lock, no fact but for the first.
        answer = self._answers.get(event.job_id)
        if answer is None or answer.lease != event.lease or answer.ended:
            return
        try:
            if answer.put(event.text, self._clock.now()):
                self._post(Began(event.job_id, event.lease))
        except Slow as slow:
            self._post(Withdrawn(event.job_id, f"the client reads too slowly: {slow}"))
        except Spoilt as spoilt:
            self._post(Spoiled(event.job_id, str(spoilt), spoilt.lost))

    def _completed(self, worker_id: WorkerId, event: Completed) -> None:
        answer = self._answers.get(event.job_id)
        if answer is None or answer.lease != event.lease:
            self._post(Answered(worker_id, event))
            return
        try:
            answer.check_whole()
        except Spoilt as spoilt:
            self._post(Spoiled(event.job_id, str(spoilt), spoilt.lost))
        # Said in any case, for it is what frees the slot on a wire that cannot cancel.
        self._post(Answered(worker_id, event, answer.text))

    def _gone(self, connection: Connection, reason: str) -> None:
        if (worker_id := self._peers.leave(connection)) is not None:
            self._post(Departed(worker_id, reason))

    # Decisions and actions.

    def _decide(self, batch: list[Stimulus]) -> list[tuple[Fact, Holder | None]]:
        """Apply what follows; return the facts, each with who held the job."""
        now = self._clock.now()
        facts: list[tuple[Fact, Holder | None]] = []

        def apply(fact: Fact) -> None:
            facts.append((fact, self._holder(fact)))
            self.pool.apply(fact, now)

        for stimulus in batch:
            if isinstance(stimulus, Submitted) and self._full:
                # Perhaps only because a burst has not been given out yet.
                for lease in plan(self.pool):
                    apply(lease)
                if self._full:
                    self._refuse(stimulus.job.id)
                    continue
            for fact in react(self.pool, stimulus):
                apply(fact)
        self._forgive(now)
        for lease in plan(self.pool):
            apply(lease)
        return facts

    def _forgive(self, now: float) -> None:
        again = self.pool.forgive(now)
        if self._forgiving is not None:
            self._forgiving.cancel()
            self._forgiving = None
        if again is not None:
            self._forgiving = self._clock.call_at(again, self._wake.set)

    @property
    def _full(self) -> bool:
        return self.pool.waiting >= self._queue_max

    def _refuse(self, job_id: JobId) -> None:
        error = QueueFull(f"{self.pool.waiting} jobs are waiting already")
        self._answers.pop(job_id).fail(error)
        self._settle(job_id, error)

    def _settle(self, job_id: JobId, error: ShoalError | None = None) -> None:
        """Tell whoever submitted the job whether it was accepted."""
        accepted = self._accepting.pop(job_id)
        if accepted.done():
            return  # it left meanwhile
        if error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def _holder(self, fact: Fact) -> Holder | None:
        if not isinstance(fact, (JobFailed, JobCancelled, JobExpired)):
            return None
        job = self.pool.jobs[fact.job_id]
        return None if job.worker_id is None else (job.worker_id, job.lease)

    def _act(self, fact: Fact, holder: Holder | None) -> None:
        match fact:
            case JobSubmitted(job):
                self._settle(job.id)
                self._watch(job.id)
            case JobLeased():
                self._lease(fact)
                self._watch(fact.job_id)
            case JobStarted() | JobRequeued():
                self._watch(fact.job_id)
            case JobCompleted(job_id, _, outcome):
                self._answers[job_id].finish(outcome)
                self._forget(job_id)
            case JobFailed() | JobCancelled() | JobExpired():
                self._answers[fact.job_id].fail(_error(fact))
                self._forget(fact.job_id)
                if holder is not None:
                    self._cancel(fact.job_id, *holder)
            case WorkerJoined(worker_id=worker_id):
                self._peers.entered(worker_id)
            case WorkerLostFact(worker_id=worker_id):
                self._peers.left(worker_id)
            case WorkerDraining() | CameLate():
                pass

    def _lease(self, fact: JobLeased) -> None:
        job = self.pool.jobs.get(fact.job_id)
        worker = self.pool.workers.get(fact.worker_id)
        peer = self._peers.of(fact.worker_id)
        if job is None or job.lease != fact.lease or worker is None or peer is None:
            return  # over already, by what came in the same batch
        continues = Feature.CONTINUE in worker.offer.features
        answer = self._answers[fact.job_id]
        answer.grant(fact.lease, continues=continues)
        beginning = answer.text if continues else ""
        # If it has gone meanwhile, it does not hear this, and that it went is in the
        # mailbox.
        peer.issue(RunJob(fact.job_id, fact.lease, job.job.work, beginning))

    def _cancel(self, job_id: JobId, worker_id: WorkerId, lease: LeaseNumber) -> None:
        peer = self._peers.of(worker_id)
        if peer is not None and CancelJob in peer.accepts:
            peer.issue(CancelJob(job_id, lease))

    def _forget(self, job_id: JobId) -> None:
        del self._answers[job_id]
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()

    def _count(self) -> None:
        if self.pool.jobs or self._accepting:
            self._idle.clear()
        else:
            self._idle.set()

    # Time limits.

    def _watch(self, job_id: JobId) -> None:
        """Look at the job's limits when the next of them may be reached."""
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()
        job = self.pool.jobs.get(job_id)
        if job is None:
            return
        now = self._clock.now()
        answer = self._answers[job_id]
        # While a new lease is being stored, the answer is still the last one's.
        last_output = answer.last_output if answer.lease == job.lease else None
        due = overdue(job, now, last_output)
        if isinstance(due, Limit):
            self._post(Overdue(job_id, due))
        else:
            self._timers[job_id] = self._clock.call_at(due, lambda: self._watch(job_id))

    def _break(self, error: StoreError) -> None:
        log.error("store failed, no more work is taken until a restart: %s", error)
        self._broken = error
        for job_id in list(self._accepting):
            self._settle(job_id, error)
        for answer in self._answers.values():
            answer.fail(error)
        for timer in self._timers.values():
            timer.cancel()
        self._idle.set()  # nothing that is open will ever end


class Port:
    """Where one connection's driver reports to."""

    def __init__(self, hub: Hub, connection: Connection) -> None:
        self._hub = hub
        self._connection = connection

    def heard(self, event: Event) -> None:
        self._hub._heard(self._connection, event)

    def gone(self, reason: str) -> None:
        self._hub._gone(self._connection, reason)


def _error(fact: JobFailed | JobCancelled | JobExpired) -> ShoalError:
    match fact:
        case JobFailed(error=error, lost=lost):
            return WorkerLost(error) if lost else JobError(error)
        case JobCancelled(reason=reason):
            return Cancelled(reason)
        case JobExpired(limit=limit, error=error):
            return NoWorker(error) if limit is Limit.QUEUE else TimedOut(error)
