"""The hub: one task that owns the pool.  Input → facts → store → effects."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import NamedTuple

from shoal.coordinator.answer import Answer
from shoal.coordinator.answer_reader import AnswerStream
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.bookkeeping import Bookkeeper
from shoal.coordinator.connections import (
    PeerRoute,
    WorkerConnection,
    WorkerConnections,
    WorkerRegistration,
)
from shoal.coordinator.deadlines import Deadlines
from shoal.coordinator.effects import Effects
from shoal.coordinator.fact_log import FactLog
from shoal.coordinator.fact_recorder import FactRecorder, is_deferrable, is_stored
from shoal.coordinator.job_listener import JobListener
from shoal.coordinator.open_answers import OpenAnswers
from shoal.coordinator.receipt_verifier import HubMail, ReceiptVerifier
from shoal.coordinator.recovery import restore_pool
from shoal.coordinator.worker_events import WorkerEvents, WorkerPort
from shoal.domain.errors import ShoalError, ShuttingDown, StoreError
from shoal.domain.facts import Fact, JobCancelled, JobExpired
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.vocabulary import Completed
from shoal.domain.work import Job
from shoal.domain.worker import MachineHealth
from shoal.ledger.accounts import Books
from shoal.ledger.keys import Signer
from shoal.pool.hedge import hedges, next_hedge
from shoal.pool.inputs import (
    NO_OUTCOME,
    Cancellation,
    HubInput,
    LeaseResult,
    Submission,
)
from shoal.pool.job_admission import queue_room, why_impossible, why_not_queued
from shoal.pool.plan import plan
from shoal.pool.react import Revocation, react, revocations
from shoal.pool.state import PoolState
from shoal.store.memory_blobs import MemoryBlobs
from shoal.store.port import Store
from shoal.transports.clock import Clock, Timer

QUEUE_MAX = 1000  # jobs that may wait; more are refused so that no wait is hopeless
GATHER_AT = 32  # waiting jobs from which on what happens is gathered for a commit
GATHER_SECONDS = 0.002  # seconds of that: where as many wait, it is no wait to speak of
GOING_AWAY = 1001  # WebSocket close code (RFC 6455, section 7.4.1)


class Decision(NamedTuple):
    """A fact, who is to stop working because of it, and whether it is stored."""

    fact: Fact
    revoked: list[Revocation]
    stored: bool


log = logging.getLogger("shoal.hub")


class Hub:
    """The coordinator's centre.

    Other tasks submit jobs, withdraw them and report what workers say; ``run`` does
    the rest.  Nothing is acted on before it is in the store.

    ``hedge_after`` is for how many seconds a worker may be silent before another one
    is given the job as well; None: no other is.  ``signer`` countersigns receipts,
    ``fee`` and ``aside`` are as in ``Bookkeeper``; ``blobs`` has what calls refer to.
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
    ) -> None:
        self.pool = PoolState()
        self.blobs = blobs or BlobTransfer(MemoryBlobs())
        self.new_id = new_id
        self._store = store
        self._clock = clock
        self._queue_max = queue_max
        self._hedge_after = hedge_after
        self._verifier = ReceiptVerifier(self.pool, store, aside)
        self._bookkeeper = Bookkeeper(self.pool, store, signer, fee, aside)
        self._recorder = FactRecorder(store, self._bookkeeper, clock, self._wake_up)
        self._mailbox: list[HubMail] = []
        self._waiting: list[asyncio.Future[None]] = []  # who waits for the next batch
        self._deferred = False  # whether some of this batch was left for the next
        self._unpaid = False  # whether some gave back their places, for lack of funds
        self._wake = asyncio.Event()
        self._alarm: Timer | None = None
        self._answers = OpenAnswers(store, self.blobs)
        self._connections = WorkerConnections()
        self._worker_events = WorkerEvents(
            self.pool, self._answers, self._connections, clock, self.post
        )
        self._deadlines = Deadlines(self.pool, self._answers, clock, self.post)
        self._effects = Effects(
            self.pool,
            self._answers,
            self._connections,
            self._deadlines,
            self.blobs,
            self.post,
        )
        self._listeners: list[Callable[[Fact], None]] = [FactLog().on_fact]
        self._room_listeners: list[Callable[[], None]] = []
        self._idle = asyncio.Event()  # set while no job is open
        self._idle.set()
        self._stopping = False
        self._broken: StoreError | None = None

    # For those who want work done.

    @asynccontextmanager
    async def run_job(self, job: Job) -> AsyncIterator[AnswerStream]:
        """Have ``job`` done for the length of the block; leaving early cancels it.

        However the block ends, by return, disconnect or error, no worker is left
        working for a client that has gone, unless the job ``goes_on``.  The next who
        asks for the same under the same idempotency key is given the same answer, from
        its beginning, also when it has ended.

        Raises UnknownModel, CannotDo, ContextExceeded, InsufficientFunds, QueueFull,
        KeyReused, ShuttingDown or StoreError before the job is accepted.
        """
        answer = await self._answers.find(job) or self._submit(job)
        reading = answer.open_reader()
        try:
            await self._answers.wait_accepted(answer.job_id)
            yield reading
        finally:
            answer.remove_reader(reading)
            if not (answer.ended or answer.has_readers or job.continues_unattended):
                self.post(Cancellation(answer.job_id, "the client left"))

    def submit(self, job: Job, listener: JobListener) -> None:
        """Have ``job`` done; ``asker`` is told of all that becomes of it.

        Nothing stands under its idempotency key, if it has one: the store is not asked.
        Whoever wants it no more withdraws it.

        Raises what ``answering`` does for a job that can never be done, and KeyReused
        for one whose key is in use now; of one that finds no room the asker is told.
        """
        self._answers.check_unused(job)
        self._submit(job, listener)

    def queue_room(self, owner: str) -> int:
        """Return how many jobs of an owner may be placed now without being refused."""
        room = queue_room(self.pool, owner, self._queue_max)
        return room - len(self._answers.unaccepted)

    def on_queue_room(self, call: Callable[[], None]) -> None:
        """Call once when there may be more room than now."""
        self._room_listeners.append(call)

    async def is_duplicate(self, job: Job) -> bool:
        """Say whether the same was asked for under the same idempotency key.

        Raises KeyReused if it was something else, StoreError.
        """
        return await self._answers.find(job) is not None

    def why_refused(self, job: Job) -> ShoalError | None:
        """Say why a job would not be taken now, its price aside; None if it would."""
        hindrance = self._why_impossible(job)
        return hindrance or why_not_queued(self.pool, job, self._queue_max)

    @contextmanager
    def observe_job(self, job_id: JobId) -> Iterator[AnswerStream | None]:
        """Read an open job's answer beside others, without a say in whether it goes on.

        None if the job is not open.
        """
        answer = self._answers.get(job_id)
        if answer is None:
            yield None
            return
        reading = answer.open_reader(asked=False)
        try:
            yield reading
        finally:
            answer.remove_reader(reading)

    def cancel_all_of(self, owner: str, reason: str) -> int:
        """Cancel all open jobs of an owner; return how many there were."""
        jobs = [job.job.id for job in self.pool.jobs.values() if job.job.owner == owner]
        for job_id in jobs:
            self.post(Cancellation(job_id, reason))
        return len(jobs)

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; say whether there was one."""
        if job_id not in self._answers:
            return False
        self.post(Cancellation(job_id, reason))
        return True

    def end_call_stream(self, job_id: JobId) -> None:
        """Free the slot of a lane whose worker was told that it is over."""
        answer = self._answers.get(job_id)
        if answer is not None and answer.worker_id is not None:
            over = Completed(job_id, answer.lease)
            self.post(LeaseResult(answer.worker_id, over, NO_OUTCOME))

    @property
    def unavailable_reason(self) -> str | None:
        """Say why jobs are not taken, or None if they are."""
        if self._broken is not None:
            return str(self._broken)
        return "stopping" if self._stopping else None

    async def process(self, hub_input: HubInput) -> None:
        """Have the hub decide about something; return when that is in the store.

        Raises StoreError.
        """
        if self._broken is not None:
            raise self._broken
        told = asyncio.get_running_loop().create_future()
        self._waiting.append(told)
        self.post(hub_input)
        await told

    @property
    def books(self) -> Books:
        """What is on which account; whoever reads it changes nothing."""
        return self._bookkeeper.books

    @property
    def public_key(self) -> bytes:
        """What receipts and checkpoints are verified with, 32 bytes."""
        return self._bookkeeper.public_key

    @property
    def health(self) -> Mapping[WorkerId, MachineHealth]:
        """How the workers' machines are, as far as they say so."""
        return self._worker_events.health

    def peer_route_of(self, worker_id: WorkerId) -> PeerRoute | None:
        """Return which peer a worker is a part of, if it is one of several."""
        return self._connections.route_of(worker_id)

    def subscribe(self, listener: Callable[[Fact], None]) -> None:
        """Tell ``witness`` of every fact from now on, once it is in the store."""
        self._listeners.append(listener)

    # For those who speak with workers.

    def connect(
        self, connection: WorkerConnection, wire: str, via: PeerRoute | None = None
    ) -> WorkerPort:
        """Take note of a connection; its events and its end go to what is returned."""
        return WorkerPort(
            self._worker_events, WorkerRegistration(connection, wire, via=via)
        )

    # For whoever owns the hub.

    async def restore(self) -> int:
        """Take up the books, and the jobs that were open when the last one ended."""
        await self._bookkeeper.open()
        stored = await restore_pool(self.pool, self._store, self._clock)
        for each in stored:
            # Its client is gone, but nobody withdrew it: it is done all the same, and
            # the result can be asked for.
            self._answers.restore(each.job)
            self._deadlines.check(each.job.id)
        self._update_idle()
        return len(stored)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._wake.wait()
            if self.pool.queued >= GATHER_AT:
                await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            batch, self._mailbox = self._mailbox, []
            told, self._waiting = self._waiting, []
            self._deferred = self._unpaid = False
            try:
                decided = self._decide(await self._verifier.verify_batch(batch))
                if not (decided or told or self._recorder.is_due):
                    self._update_idle()
                    if self._unpaid:
                        self._notify_room()  # nothing else may ever happen
                    continue
                kept = [each.fact for each in decided if each.stored]
                if kept or told or self._recorder.is_due:
                    urgent = not all(map(_is_deferrable, decided))
                    await self._recorder.record(kept, urgent=urgent)
            except StoreError as error:
                self._waiting += told
                self._fail(error)
                return
            for fact, recalled, _ in decided:
                for witness in self._listeners:
                    witness(fact)
                self._effects.apply(fact, recalled)
            if self._deferred:
                # Theirs may be among what was put off.
                self._waiting[:0] = told
                told = []
            for each in told:
                if not each.done():
                    each.set_result(None)
            self._update_idle()
            self._notify_room()

    async def drain(self) -> None:
        """Take no new jobs, and wait until those that are open have ended."""
        self._stopping = True
        await self._idle.wait()

    def disconnect_all(self, reason: str) -> None:
        """End every worker's connection; they may come back."""
        for peer in self._connections:
            peer.disconnect(reason, GOING_AWAY, reason)

    # Stimuli.

    def _wake_up(self) -> None:
        self._wake.set()

    def post(self, mail: HubMail) -> None:
        # Not bounded here, for everything that posts is: clients by the queue,
        # workers by one joining each and a few words for each lease, and whoever tells
        # the hub something by waiting until it is stored.
        if self._broken is None:
            self._mailbox.append(mail)
            self._wake.set()

    def _submit(self, job: Job, listener: JobListener | None = None) -> Answer:
        if (error := self._why_impossible(job)) is not None:
            raise error
        answer = self._answers.submit(job, listener)
        self._idle.clear()
        self.post(Submission(job))
        return answer

    def _notify_room(self) -> None:
        wanting, self._room_listeners = self._room_listeners, []
        for call in wanting:
            call()

    def _why_impossible(self, job: Job) -> ShoalError | None:
        if self._broken is not None:
            return self._broken
        if self._stopping:
            return ShuttingDown("the coordinator is stopping: try again shortly")
        return why_impossible(self.pool, job, self._clock.now())

    # Decisions.

    def _decide(self, batch: list[HubInput]) -> list[Decision]:
        """Apply what follows from a batch, leases last; return the facts."""
        now, at = self._clock.now(), self._clock.wall()
        decided: list[Decision] = []

        def apply(fact: Fact) -> None:
            fact = self._with_written(fact)
            kept = is_stored(fact, self.pool)
            decided.append(Decision(fact, revocations(self.pool, fact), kept))
            self._bookkeeper.record(fact, at)
            self.pool.apply(fact, now)

        for index, stimulus in enumerate(batch):
            if isinstance(stimulus, Submission):
                job = stimulus.job
                unpaid = self._bookkeeper.why_unaffordable(job)
                full = why_not_queued(self.pool, job, self._queue_max)
                self._unpaid |= unpaid is not None
                if unpaid is None and full is not None and plan(self.pool):
                    # The queue is full only because a burst was not given out yet.  No
                    # lease ends in the batch that it begins in, so the rest waits.
                    self._mailbox[:0] = batch[index:]
                    self._deferred = True
                    self._wake.set()
                    break
                if (error := unpaid or full) is not None:
                    self._refuse(job, error)
                    continue
            for fact in react(self.pool, stimulus):
                apply(fact)
        alarms = [self.pool.expire_penalties(now)]
        for lease in plan(self.pool):
            apply(lease)
        if self._hedge_after is not None:
            for hedge in hedges(self.pool, now, self._hedge_after):
                apply(hedge)
            alarms.append(next_hedge(self.pool, now, self._hedge_after))
        self._set_alarm([when for when in alarms if when is not None])
        return decided

    def _with_written(self, fact: Fact) -> Fact:
        """Note how much an owner was given of an answer that nobody will end.

        Else whoever leaves just before the end would never use anything up.
        """
        if not isinstance(fact, JobCancelled | JobExpired):
            return fact
        answer = self._answers.get(fact.job_id)
        return fact if answer is None else replace(fact, written=answer.size)

    def _set_alarm(self, times: list[float]) -> None:
        """Decide anew at the first of ``times``, though nothing may have happened."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if times:
            self._alarm = self._clock.call_at(min(times), self._wake.set)

    def _refuse(self, job: Job, error: ShoalError) -> None:
        answer = self._answers[job.id]
        answer.fail(error)
        self._answers.resolve(job.id, error)
        self._effects.forget(job.id)

    def _update_idle(self) -> None:
        if self.pool.jobs or self._answers.unaccepted:
            self._idle.clear()
        else:
            self._idle.set()

    def _fail(self, error: StoreError) -> None:
        log.error("store failed, no more work is taken until a restart: %s", error)
        self._broken = error
        for job_id in self._answers.unaccepted:
            self._answers.resolve(job_id, error)
        for told in self._waiting:
            if not told.done():  # else whoever told it has left
                told.set_exception(error)
        for answer in self._answers.values():
            answer.fail(error)
        self._deadlines.stop()
        self._idle.set()  # nothing that is open will ever end


def _is_deferrable(decided: Decision) -> bool:
    """Say whether nothing hangs on a fact's being stored at once."""
    return not decided.stored or (is_deferrable(decided.fact) and not decided.revoked)
