"""The hub: one task that owns the pool.  Input → facts → store → effects."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from shoal.coordinator import open_answers
from shoal.coordinator.answer import Answer, JobListener
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.bookkeeping import (
    Bookkeeper,
    FactRecorder,
    is_deferrable,
    is_stored,
)
from shoal.coordinator.call_grants import CallGrants
from shoal.coordinator.connections import (
    PeerRoute,
    WorkerConnection,
    WorkerConnections,
    WorkerRegistration,
)
from shoal.coordinator.effects import Deadlines, Effects
from shoal.coordinator.fact_log import FactLog
from shoal.coordinator.loads import describe_loads, with_load_state
from shoal.coordinator.mailbox import Mailbox
from shoal.coordinator.receipt_verifier import HubMail, ReceiptVerifier
from shoal.coordinator.recovery import restore_pool
from shoal.coordinator.store_health import StoreHealth
from shoal.coordinator.worker_events import WorkerEvents, WorkerPort
from shoal.domain.errors import Fenced, ShoalError, ShuttingDown, StoreError
from shoal.domain.facts import Fact, JobCancelled, JobExpired, JobLeased
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import AnswerPiece
from shoal.domain.vocabulary import Completed
from shoal.domain.work import Call, CallStream
from shoal.ledger.accounts import Books
from shoal.ledger.keys import Signer
from shoal.pool import eligibility, inputs, waking
from shoal.pool.departures import departures, overdue_drains
from shoal.pool.hedge import hedges, next_hedge
from shoal.pool.job_admission import permanent_rejection, queue_rejection, queue_room
from shoal.pool.last_resort import last_resorts, next_resort
from shoal.pool.open_job import OpenJob
from shoal.pool.plan import plan
from shoal.pool.react import REVOKING, Revocation, react, revocations
from shoal.pool.state import PoolState
from shoal.pool.suspensions import Approvals
from shoal.pool.worker import Worker
from shoal.protocols.seam.session import CloseCode
from shoal.store.blobs import MemoryBlobs
from shoal.store.codec import is_large
from shoal.store.port import Epoch, Store, commit_ids
from shoal.transports.clock import Clock, Timer

QUEUE_MAX = 1000  # queued jobs; more are refused
AHEAD_MAX = 100  # jobs before another one that are counted for its client
GATHER_AT = 32  # queued jobs from which inputs are gathered into larger commits
GATHER_SECONDS = 0.002  # seconds of gathering
QUIET_MAX = 30.0  # seconds without output until clients wait no more for a full disk
NOT_ACCEPTED = "the store failed before the job was accepted"

FactListener: TypeAlias = Callable[[Sequence[Fact]], None]


class Decision(msgspec.Struct, frozen=True):
    """A fact, the leases that it revokes, and whether it is stored."""

    fact: Fact
    revoked: list[Revocation]
    stored: bool


class Hub:
    """The coordinator's centre.

    Other tasks submit and cancel jobs and post workers' events; ``run`` does the rest.
    No effect precedes its fact in the store.  While that fails, the batch that could
    not be stored waits, and all that arrives waits behind it: see ``StoreHealth``.

    Args:
        hedge_after: seconds of a worker's silence after which a second worker gets the
            job as well; None: never.
        signer: countersigns receipts.
        fee, aside: as in ``Bookkeeper``.
        blobs: the values that calls refer to.
        approve_nodes: as in ``ServeConfig``.
        traced: as in ``Effects``.
        call_secret: as in ``CallGrants``.

    ``public_key`` is the Ed25519 key that verifies receipts and checkpoints, 32 bytes.
    ``epoch`` is that of its commits.
    ``health`` is that of workers' machines, as far as they report it, and
    ``commit_seconds`` how long the commits of facts have taken.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        new_id: Callable[[], JobId],
        signer: Signer,
        queue_max: int = QUEUE_MAX,
        hedge_after: float | None = None,
        fee: int = 0,
        aside: float = math.inf,
        blobs: BlobTransfer | None = None,
        *,
        approve_nodes: bool = False,
        traced: bool = False,
        call_secret: bytes = b"",
    ) -> None:
        self.pool = PoolState(approvals=Approvals(required=approve_nodes))
        self.blobs = blobs or BlobTransfer(MemoryBlobs())
        self.new_id = new_id
        self.public_key = signer.public_key
        self.epoch = Epoch(0)
        self.carried: open_answers.CarriedJobs = open_answers.NoCarriedJobs()
        self.store_health = StoreHealth(clock)
        self.store_health.subscribe(self)
        self._store = store
        self._clock = clock
        self._queue_max = queue_max
        self._hedge_after = hedge_after
        self._verifier = ReceiptVerifier(self.pool, store, aside)
        self._bookkeeper = Bookkeeper(self.pool, store, signer, fee, aside)
        self._wake = asyncio.Event()
        self._recorder = FactRecorder(
            store, self._bookkeeper, self.store_health, clock, self._wake.set
        )
        self.commit_seconds = self._recorder.commit_seconds
        self._mailbox = Mailbox()
        self._batch: list[HubMail] = []  # the last that was taken from it
        # Callers that wait for the next batch, with their input.
        self._waiting: list[tuple[inputs.HubInput, asyncio.Future[None]]] = []
        self._awaited: dict[JobId, Job] = {}  # whose clients may come back
        # Of these, what their workers still run: a client brings the text first.
        self._returned: dict[JobId, JobLeased] = {}
        self._deferred = False  # whether inputs of this batch were deferred
        self._unpaid = False  # whether jobs were refused for lack of funds
        self._alarm: Timer | None = None
        self._answers = open_answers.OpenAnswers(store, self.blobs)
        self.when_accepted = self._answers.when_accepted
        self.grants = CallGrants(call_secret, self.pool, self._answers)
        self._connections = WorkerConnections()
        self._worker_events = WorkerEvents(
            self.pool,
            self._answers,
            self._connections,
            clock,
            self.post,
            self._mailbox.has_room,
            hedge_after is not None,
        )
        self.health = self._worker_events.health
        self._deadlines = Deadlines(self.pool, self._answers, clock, self.post)
        self._effects = Effects(
            self.pool,
            self._answers,
            self._connections,
            self._deadlines,
            self.blobs,
            self.grants,
            self.post,
            lambda job_id: self.carried.has(job_id),
            traced,
            hedge_after is not None,
        )
        self._listeners: list[FactListener] = [FactLog().on_facts]
        self._room_listeners: list[Callable[[], None]] = []
        self._idle = asyncio.Event()  # set while no job is open
        self._idle.set()
        self._stopping = False

    # For clients.

    def run_job(
        self,
        job: Job,
        *,
        early: bool = False,
        check: Callable[[JobId], None] | None = None,
        seen: Sequence[AnswerPiece] | None = None,
    ) -> "JobBlock":
        """Run ``job`` for the length of the block; leaving early cancels it.

        However the block ends, no worker is left working for a client that has
        disconnected, for longer than the job goes on ``unattended``.  A repeated
        request with the same idempotency key reads the same answer from its beginning,
        even after it has ended.

        The block begins when the job is accepted, or ``early``: then the reader has
        nothing before that, and raises why it was refused.  ``check`` is called as it
        begins, and before Cancelled is raised; it may raise another error.

        ``seen``: the job was submitted to an earlier coordinator, which may have
        accepted it, and the client has read these pieces.  The reader goes on after
        them.  Raises WorkerLost if the answer is another one, or how it ended.

        Raises UnknownModel, CannotDo, ContextExceeded, InsufficientFunds, QueueFull,
        KeyReused, ShuttingDown or StoreError before the job is accepted.
        """
        return JobBlock(self, job, early, check, seen)

    def attach_at_once(self, job: Job) -> AnswerCursor | None:
        """Submit a job and read its answer; None: something has to be awaited first.

        Raises as ``run_job`` does.
        """
        if job.idempotency_key or (job.terms.kept and is_large(job)):
            return None
        return self._submit(job).open_reader()

    async def attach(
        self, job: Job, seen: Sequence[AnswerPiece] | None = None
    ) -> AnswerCursor:
        """Submit a job, or find the one that it repeats; read its answer.

        ``seen`` and what it raises are as in ``run_job``; ``detach`` the reader.
        """
        again = None if seen is None else await self._answers.find_submitted(job)
        answer = (
            again or await self._answers.find(job) or await self._submit_prepared(job)
        )
        if seen:
            answer.seed(seen, self._clock.now())
        reader = answer.open_reader(after=seen or ())
        if self._awaited:
            self._on_returned(answer.job_id)
        return reader

    def detach(self, reader: AnswerCursor, job: Job) -> None:
        """Stop reading; a job without a reader is cancelled."""
        reader.answer.remove_reader(reader)
        self._end_unattended(reader.answer, job)

    async def wait_accepted(self, job_id: JobId) -> None:
        """Wait until a job is accepted.  Raises the error it was refused with."""
        await self._answers.wait_accepted(job_id)

    def _end_unattended(self, answer: Answer, job: Job) -> None:
        """Cancel a job without a client, now or when it has gone on for long enough."""
        if answer.end is not None or answer.has_readers:
            return
        left_at = answer.left_at = self._clock.now()

        def end() -> None:
            returned = answer.has_readers or answer.left_at != left_at
            if answer.end is None and not returned:
                self.post(inputs.Cancellation(answer.job_id, "the client left"))

        if job.unattended == 0.0:
            end()
        elif job.unattended < math.inf:
            self._clock.call_at(left_at + job.unattended, end)

    def submit(self, job: Job, listener: JobListener | None = None) -> None:
        """Run ``job``; ``listener``, if any, gets its events.

        Its idempotency key, if any, must be fresh: the store is not searched for it.
        ``cancel`` ends it early.

        Raises as ``run_job`` does for a job that can never run, and KeyReused if an
        open job has its key.  A job that finds no room ends with ``on_end``.
        """
        self._answers.check_unused(job)
        self._submit(job, listener)

    def queue_room(self, owner: str) -> int:
        """Return how many jobs of an owner the queue would take now."""
        room = queue_room(self.pool, owner, self._queue_max)
        return room - len(self._answers.unaccepted)

    def waits_for(self, job_id: JobId) -> str | None:
        """Return what a queued job waits for; None: it is not queued.

        Beyond ``AHEAD_MAX``, jobs that are served before it are not counted.
        """
        job = self.pool.jobs.get(job_id)
        if job is None or job.worker_id is not None:
            return None
        if job.awaits is not None:
            return "its worker, which may still run it, to reconnect"
        if eligibility.awaits_load(self.pool, job.model):
            return describe_loads(
                self.pool, job.model, self._answers, self._clock.now()
            )
        if not eligibility.has_suitable_worker(self.pool, job):
            return eligibility.no_worker_reason(self.pool, job)
        turns = islice(self.pool.queues[job.model].in_order(), AHEAD_MAX)
        places = (place for place, turn in enumerate(turns) if turn.job is job)
        return f"jobs ahead: {next(places, AHEAD_MAX)}"

    def on_queue_room(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, when the queue may have more room than now."""
        self._room_listeners.append(call)

    def check_unused(self, job: Job) -> None:
        """Raise KeyReused if an open job has the same idempotency key."""
        self._answers.check_unused(job)

    async def is_duplicate(self, job: Job) -> bool:
        """Say whether a job with the same idempotency key exists.

        Raises KeyReused if it requests something else, StoreError.
        """
        return await self._answers.find(job) is not None

    def permanent_rejection(self, job: Job) -> ShoalError | None:
        """Return the error if a job can never run, or if no jobs are accepted."""
        failure = self.store_health.failure
        # Jobs that are not stored wait with the batch, as streams of stored calls do.
        if failure is not None and (job.terms.kept or self.store_health.is_broken):
            return failure
        if self._stopping:
            return ShuttingDown("the coordinator is stopping: try again shortly")
        return permanent_rejection(self.pool, job, self._clock.now())

    def rejection(self, job: Job) -> ShoalError | None:
        """Return the error if a job would be refused now, apart from its price."""
        reason = self.permanent_rejection(job)
        return reason or queue_rejection(self.pool, job, self._queue_max)

    @contextmanager
    def observe_job(self, job_id: JobId) -> Iterator[AnswerCursor | None]:
        """Read an open job's answer without keeping the job alive.

        Yields None if the job is not open.
        """
        answer = self._answers.get(job_id)
        if answer is None:
            with self.carried.observe(job_id) as carried:
                yield carried
            return
        reading = answer.open_reader(counts=False)
        try:
            yield reading
        finally:
            answer.remove_reader(reading)

    def cancel_all_of(self, owner: str, reason: str) -> int:
        """Cancel all open jobs of an owner; return their number."""
        jobs = [job.job.id for job in self.pool.jobs.values() if job.job.owner == owner]
        jobs += self._answers.unaccepted_of(owner)
        for job_id in jobs:
            self.post(inputs.Cancellation(job_id, reason))
        return len(jobs) + self.carried.cancel_all_of(owner, reason)

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; return whether it was open."""
        if job_id not in self._answers:
            return self.carried.cancel(job_id, reason)
        self.post(inputs.Cancellation(job_id, reason))
        return True

    async def cancel_now(self, job_id: JobId, reason: str) -> None:
        """Cancel a job, and wait until that is in the store.

        Raises StoreError, at once if the store is failing.
        """
        self._check_store()
        if self.carried.cancel(job_id, reason):
            await self.carried.stored()
        else:
            await self.process(inputs.Cancellation(job_id, reason))

    def end_call_stream(self, job_id: JobId) -> None:
        """Free the slot of a call stream after asking its worker to end it."""
        answer = self._answers.get(job_id)
        if answer is not None and answer.worker_id is not None:
            over = Completed(job_id, answer.lease)
            self.post(inputs.LeaseResult(answer.worker_id, over, inputs.NO_OUTCOME))

    @property
    def unavailable_reason(self) -> str | None:
        """Why no jobs are accepted; None if they are."""
        if self.store_health.failure is not None:
            return str(self.store_health.failure)
        return "stopping" if self._stopping else None

    @property
    def degraded_reason(self) -> str | None:
        """Why accepted jobs are slow; None: they are not."""
        if seconds := self.store_health.slow_for:
            return (
                f"a commit of the database takes {seconds:.1f} s: its disk is busy or "
                "failing"
            )
        return None

    async def process(self, hub_input: inputs.HubInput) -> None:
        """Post an input and wait until its facts are in the store.

        Raises StoreError if it has no effect: at once if the store is failing.
        """
        self._check_store()
        self._worker_events.tell_begun()  # an order may take jobs from their workers
        stored = asyncio.get_running_loop().create_future()
        self._waiting.append((hub_input, stored))
        self.post(hub_input)
        await stored

    @property
    def books(self) -> Books:
        """The balance of each account, read-only."""
        return self._bookkeeper.books

    @property
    def answers(self) -> Mapping[JobId, Answer]:
        """The answers of open jobs, read-only, for those who observe all of them."""
        return self._answers

    def peer_route_of(self, worker_id: WorkerId) -> PeerRoute | None:
        """Return the peer that a worker belongs to, if that has several."""
        return self._connections.route_of(worker_id)

    def connected_at(self, worker_id: WorkerId) -> float | None:
        """Return the monotonic time at which a worker connected."""
        return self._connections.opened_at(worker_id)

    def subscribe(self, listener: FactListener) -> None:
        """Call ``listener`` with all facts from now on, a batch once it is stored."""
        self._listeners.append(listener)

    def publish(self, facts: Sequence[Fact]) -> None:
        """Pass on facts about carried jobs, once they are stored."""
        for listener in self._listeners:
            listener(facts)

    # For connections to workers.

    def connect(
        self, connection: WorkerConnection, wire: str, via: PeerRoute | None = None
    ) -> WorkerPort:
        """Register a connection; its events and its end go to the returned port."""
        opened = WorkerRegistration(connection, wire, self._clock.now(), via=via)
        return WorkerPort(self._worker_events, opened)

    # For the owner of the hub.

    async def restore(self, *, clients_return: bool = False) -> int:
        """Take the store over: load the books and the open jobs of its last owner.

        ``clients_return``: no worker gets a job until the clients of those jobs have
        come back, or ``end_return`` is called.
        """
        self.epoch = await self._store.take_over()
        commits = self._recorder.commits = commit_ids(self.epoch, "hub")
        await self._bookkeeper.open()
        stored = await restore_pool(
            *(self.pool, self._store, self._clock, next(commits), self.grants),
            clients_return=clients_return,
        )
        for each in stored:
            self._answers.restore(each.job)
            self._deadlines.check(each.job.id)
            if clients_return and _has_client(each.job):
                self._awaited[each.job.id] = each.job
            elif each.job.idempotency_key:
                self._end_unattended(self._answers[each.job.id], each.job)
            # Any other's client left without cancelling it: it runs, and its result can
            # be fetched.
        self._update_idle()
        return len(stored)

    def _on_returned(self, job_id: JobId) -> None:
        """Note that the client of a restored job has come back."""
        self._awaited.pop(job_id, None)
        self._resume(job_id)
        if not self._awaited:
            self._wake.set()

    def end_return(self) -> None:
        """Give up the clients that have not come back; their jobs end."""
        awaited, self._awaited = self._awaited, {}
        for job_id, job in awaited.items():
            if (answer := self._answers.get(job_id)) is not None:
                self._end_unattended(answer, job)
            self._resume(job_id)
        self._wake.set()

    def _resume(self, job_id: JobId) -> None:
        """Let a worker go on with what it still runs, if it has come back."""
        if (fact := self._returned.pop(job_id, None)) is not None:
            self._effects.lease(fact)

    async def run(self) -> None:
        """Process inputs until cancelled."""
        while True:
            await self._wake.wait()
            if self.pool.queued >= GATHER_AT:
                await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            if not await self._process_batch():
                return

    async def _process_batch(self) -> bool:
        """Process all inputs so far; return False if the store is broken.

        A function of its own, so that a large batch is not kept until the next one.
        """
        batch = self._batch = self._mailbox.take()
        waiting, self._waiting = self._waiting, []
        self._deferred = self._unpaid = False
        try:
            verified = await self.store_health.read(
                partial(self._verifier.verify_batch, batch)
            )
            decided = self._decide(verified)
            if not (decided or waiting or self._recorder.is_due):
                self._update_idle()
                if self._unpaid:
                    self._notify_room()  # nothing else may wake them
                return True
            kept = [each.fact for each in decided if each.stored]
            if kept or waiting or self._recorder.is_due:
                urgent = not all(map(_is_deferrable, decided))
                await self._recorder.record(kept, urgent=urgent)
        except StoreError as error:
            self._waiting += waiting
            self._fail_waiting(error)
            return False
        self.publish([each.fact for each in decided])
        for each in decided:
            if isinstance(each.fact, JobLeased) and each.fact.job_id in self._awaited:
                self._returned[each.fact.job_id] = each.fact
            else:
                self._effects.apply(each.fact, each.revoked)
        if self._deferred:
            # Their inputs may be among those that were deferred.
            self._waiting[:0] = waiting
            waiting = []
        for _, stored in waiting:
            if not stored.done():
                stored.set_result(None)
        self._update_idle()
        if self._room_listeners:
            self._notify_room()
        self._batch = []
        return True

    async def drain(self) -> None:
        """Refuse new jobs, and wait until the open ones have ended."""
        self._stopping = True
        await self._idle.wait()

    def leave_all(self, reason: str) -> None:
        """Disconnect every worker, which may go on at the next coordinator.

        Their jobs stay theirs: this one gives them to no others.
        """
        self._worker_events.is_over = True
        self.disconnect_all(reason)

    def disconnect_all(self, reason: str) -> None:
        """Disconnect every worker; they may reconnect."""
        for peer in self._connections:
            peer.disconnect(reason, CloseCode.GOING_AWAY, reason)

    # Inputs.

    def post(self, mail: HubMail) -> None:
        # Not bounded here, because every source is: clients by the queue, workers by a
        # few events per connection and lease, other callers by waiting in `process`.
        # While the store fails they are not bounded so, and the mailbox is.
        if not self.store_health.is_broken and self._mailbox.post(mail):
            self._wake.set()  # which it stays until all are taken

    def _check_store(self) -> None:
        if self.store_health.failure is not None:
            raise self.store_health.failure

    def _submit(self, job: Job, listener: JobListener | None = None) -> Answer:
        if (error := self.permanent_rejection(job)) is not None:
            raise error
        answer = self._answers.submit(job, listener)
        self._idle.clear()
        self.post(inputs.Submission(job))
        return answer

    async def _submit_prepared(self, job: Job) -> Answer:
        """Submit a job, after the store has written its work if that is large."""
        if not (job.terms.kept and is_large(job)):
            return self._submit(job)
        if (error := self.rejection(job)) is not None:
            raise error  # before anything is written
        await self._store.prepare(job)
        try:
            await self._bookkeeper.prepare(job)
            # The same request may have been submitted meanwhile.
            return await self._answers.find(job) or self._submit(job)
        finally:
            if job.id not in self._answers:
                self._store.discard(job.id)
                self._bookkeeper.discard(job.id)

    def _notify_room(self) -> None:
        listeners, self._room_listeners = self._room_listeners, []
        for call in listeners:
            call()

    # Decisions.

    def _decide(self, batch: list[inputs.HubInput]) -> list[Decision]:
        """Apply what follows from a batch, leases last; return the decisions."""
        now, at = self._clock.now(), self._clock.wall()
        decided: list[Decision] = []

        def apply(fact: Fact) -> None:
            revoked: list[Revocation] = []
            if isinstance(fact, REVOKING):
                revoked = revocations(self.pool, fact)
                if isinstance(fact, JobCancelled | JobExpired):
                    fact = self._with_written(fact)
            decided.append(Decision(fact, revoked, is_stored(fact, self.pool)))
            self._bookkeeper.record(fact, at)
            self.pool.apply(fact, now)

        for index, hub_input in enumerate(batch):
            if isinstance(hub_input, inputs.Submission):
                job = hub_input.job
                unpaid = self._bookkeeper.payment_rejection(job)
                full = queue_rejection(self.pool, job, self._queue_max)
                self._unpaid |= unpaid is not None
                if unpaid is None and full is not None and self._plan():
                    # The queue is full only because a burst has no leases yet.  No
                    # lease ends in the batch it begins in, so the rest is deferred.
                    self._mailbox.put_back(batch[index:])
                    self._deferred = True
                    self._wake.set()
                    break
                if (error := unpaid or full) is not None:
                    self._refuse(job, error)
                    continue
            for fact in react(self.pool, hub_input):
                apply(fact)
        for fact in overdue_drains(self.pool, now):
            apply(fact)
        renews = partial(eligibility.waits_for_another, self.pool)
        alarms = [self.pool.expire_penalties(now, renews)]
        alarms.append(self.pool.suspensions.next_due)
        for lease in self._plan():
            apply(lease)
        if self.pool.last_resorts and not self._awaited:
            for lease in last_resorts(self.pool, now, self._can_pay):
                apply(lease)
            alarms.append(next_resort(self.pool, now))
        if self._hedge_after is not None:
            for hedge in hedges(self.pool, now, self._hedge_after):
                apply(hedge)
            alarms.append(next_hedge(self.pool, now, self._hedge_after))
        if self.pool.sleepers.by_id:
            for called in waking.calls(self.pool, now):
                apply(called)
            alarms.append(waking.next_due(self.pool, now))
        for dismissal in departures(self.pool):
            apply(dismissal)
        self._set_alarm(alarms)
        return decided

    def _plan(self) -> list[JobLeased]:
        """Return the leases to grant: none while clients may come back."""
        return [] if self._awaited else plan(self.pool)

    def _can_pay(self, job: OpenJob, worker: Worker) -> bool:
        return self._bookkeeper.hosted_shortfall(job, worker) is None

    def _with_shortfall(self, fact: JobExpired) -> JobExpired:
        """Say why no hosted provider was asked, if it was for money."""
        job = self.pool.jobs[fact.job_id]
        if fact.limit is not TimeLimit.QUEUE or job.started:
            return fact
        for worker in eligibility.hosted_for(self.pool, job):
            why = self._bookkeeper.hosted_shortfall(job, worker)
            if why is not None:
                error = f"{fact.error}; it was not given to a hosted provider: {why}"
                return replace(fact, error=error)
        return fact

    def _with_written(self, fact: JobCancelled | JobExpired) -> Fact:
        """Record the size of an answer that was cut short.

        Otherwise a client that disconnects just before the end would use up no quota.
        """
        if isinstance(fact, JobExpired):
            fact = self._with_shortfall(fact)
            fact = with_load_state(fact, self.pool, self._answers, self._clock.now())
        answer = self._answers.get(fact.job_id)
        return fact if answer is None else replace(fact, written=answer.size)

    def _set_alarm(self, times: list[float | None]) -> None:
        """Wake the hub at the first of ``times``; None is never."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        first = math.inf
        for when in times:
            if when is not None and when < first:
                first = when
        if first < math.inf:
            self._alarm = self._clock.call_at(first, self._on_alarm)

    def _on_alarm(self) -> None:
        self._worker_events.tell_begun()  # a drain may be over, and takes jobs away
        self._wake.set()

    def _refuse(self, job: Job, error: ShoalError) -> None:
        answer = self._answers[job.id]
        answer.refuse(error)
        self._answers.resolve(job.id, error)
        self._effects.forget(job.id)
        self._store.discard(job.id)
        self._bookkeeper.discard(job.id)

    def _update_idle(self) -> None:
        # Orders to load models go on at the next start.
        orders = len(self.pool.model_orders)
        if len(self.pool.jobs) > orders or self._answers.unaccepted:
            self._idle.clear()
        else:
            self._idle.set()

    # As ``StoreHealthListener``.

    def on_store_failing(self, error: StoreError) -> None:
        """Refuse what is not decided yet.

        The decided batch waits: the pool has its facts already.  Of its jobs, those
        that are not accepted are cancelled after it, because their clients get an
        error.
        """
        waiting = {id(each) for each, _ in self._waiting}
        for mail in self._mailbox.withdraw(
            lambda mail: id(mail) in waiting or _is_stored_job(mail)
        ):
            if isinstance(mail, inputs.Submission):
                self._refuse(mail.job, error)
        self._fail_waiting(error)
        self._mailbox.hold()
        unaccepted = set(self._answers.unaccepted)
        for mail in self._batch:
            if isinstance(mail, inputs.Submission) and mail.job.id in unaccepted:
                if not _is_stored_job(mail):
                    continue
                self._answers.resolve(mail.job.id, error)
                self._answers[mail.job.id].refuse(error)
                self.post(inputs.Cancellation(mail.job.id, NOT_ACCEPTED))

    def on_store_retried(self, error: StoreError) -> None:
        """Send the clients away whose answers have made no progress for long."""
        limit = self._clock.now() - QUIET_MAX
        if self.store_health.failing_for < QUIET_MAX:
            return
        for answer in self._answers.values():
            if answer.last_output is None or answer.last_output <= limit:
                answer.interrupt(error)

    def on_store_healed(self) -> None:
        self._mailbox.release()
        self._wake.set()

    def on_store_broken(self, error: StoreError) -> None:
        """End all jobs with the error; after a restart they go on.

        Another coordinator has them already if this one is fenced, and the workers
        reconnect to it.
        """
        if isinstance(error, Fenced):
            self.leave_all(str(error))
        for job_id in list(self._answers.unaccepted):
            self._answers.resolve(job_id, error)
        self._fail_waiting(error)
        for answer in self._answers.values():
            answer.finish(error)
        self._deadlines.stop()
        self._idle.set()  # open jobs will never end

    def _fail_waiting(self, error: StoreError) -> None:
        waiting, self._waiting = self._waiting, []
        for _, stored in waiting:
            if not stored.done():  # cancelled otherwise
                stored.set_exception(error)


def _has_client(job: Job) -> bool:
    """Say whether a client waits for a job as long as it is open."""
    calls = isinstance(job.work, Call | CallStream)  # whose clients find their results
    return job.unattended < math.inf and not calls


class JobBlock(msgspec.Struct):
    """The block of ``Hub.run_job``: a generator would take five times the calls."""

    hub: Hub
    job: Job
    early: bool
    check: Callable[[JobId], None] | None
    seen: Sequence[AnswerPiece] | None
    reader: AnswerCursor | None = None

    def begin(self) -> AnswerCursor | None:
        """Begin the block, if nothing has to be awaited for that; ``end`` ends it.

        None: it has not begun.  What ``check`` checks was checked just before.
        """
        if self.seen is not None or not self.early:
            return None
        reader = self.reader = self.hub.attach_at_once(self.job)
        if reader is not None and self.check is not None:
            reader.on_cancelled = partial(self.check, reader.job_id)
        return reader

    def end(self) -> None:
        """End the block."""
        assert self.reader is not None, "the block has begun"
        self.hub.detach(self.reader, self.job)

    async def __aenter__(self) -> AnswerCursor:
        reader = self.begin()
        if reader is None:
            reader = self.reader = await self.hub.attach(self.job, self.seen)
        try:
            if not self.early:
                await self.hub.wait_accepted(reader.job_id)
            if self.check is not None:
                reader.on_cancelled = partial(self.check, reader.job_id)
                self.check(reader.job_id)
        except BaseException:
            self.end()
            raise
        return reader

    async def __aexit__(self, *_: object) -> None:
        self.end()


def _is_stored_job(mail: HubMail) -> bool:
    """Say whether an input submits a job that has to be stored."""
    return isinstance(mail, inputs.Submission) and mail.job.terms.kept


def _is_deferrable(decided: Decision) -> bool:
    """Say whether a decision may be stored with a later batch."""
    return not decided.stored or (is_deferrable(decided.fact) and not decided.revoked)
