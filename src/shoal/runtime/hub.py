"""One task that owns the pool: stimulus → facts → store → actions."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import NamedTuple

from shoal.domain.errors import ShoalError, ShuttingDown, StoreError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobExpired,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.vocabulary import Completed
from shoal.domain.work import Job
from shoal.domain.worker import Health
from shoal.ledger.accounts import Books
from shoal.ledger.keys import Signer
from shoal.pool.admit import hopeless, impossible, room
from shoal.pool.hedge import hedges, next_hedge
from shoal.pool.plan import plan
from shoal.pool.react import Recall, react, recalls
from shoal.pool.state import Pool
from shoal.pool.stimuli import NOTHING, Answered, Stimulus, Submitted, Withdrawn
from shoal.runtime.acting import Acting
from shoal.runtime.answer import Answer
from shoal.runtime.asker import Asker
from shoal.runtime.blobs import Blobs
from shoal.runtime.clerk import Clerk
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.examining import Examiner, Mail
from shoal.runtime.fact_log import FactLog
from shoal.runtime.hearing import Hearing, Port
from shoal.runtime.named import Named
from shoal.runtime.peers import Connection, Peer, Peers, Via
from shoal.runtime.reading import Reader
from shoal.runtime.recorder import Recorder, can_wait, is_kept
from shoal.runtime.restoring import restore
from shoal.runtime.watch import Watch
from shoal.store.memory_blobs import MemoryBlobs
from shoal.store.port import Store

QUEUE_MAX = 1000  # jobs that may wait; more are refused so that no wait is hopeless
GATHER_FROM = 32  # waiting jobs from which on what happens is gathered for a commit
GATHER = 0.002  # seconds of that: where as many wait, it is no wait to speak of
GOING_AWAY = 1001  # WebSocket close code (RFC 6455, section 7.4.1)


class Decided(NamedTuple):
    """A fact, who is to stop working because of it, and whether it is stored."""

    fact: Fact
    recalled: list[Recall]
    kept: bool


log = logging.getLogger("shoal.hub")


class Hub:
    """The coordinator's centre.

    Other tasks submit jobs, withdraw them and report what workers say; ``run`` does
    the rest.  Nothing is acted on before it is in the store.

    ``hedge_after`` is for how many seconds a worker may be silent before another one
    is given the job as well; None: no other is.  ``signer`` countersigns receipts,
    ``fee`` and ``aside`` are as in ``Clerk``, and ``blobs`` has what calls refer to.
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
        blobs: Blobs | None = None,
    ) -> None:
        self.pool = Pool()
        self.blobs = blobs or Blobs(MemoryBlobs())
        self.new_id = new_id
        self._store = store
        self._clock = clock
        self._queue_max = queue_max
        self._hedge_after = hedge_after
        self._examiner = Examiner(self.pool, store, aside)
        self._clerk = Clerk(
            self.pool, store.ledger, self._examiner.findings, signer, fee, aside
        )
        self._recorder = Recorder(store, self._clerk, clock, self._wake_up)
        self._mailbox: list[Mail] = []
        self._told: list[asyncio.Future[None]] = []  # who waits for the next batch
        self._put_off = False  # whether some of this batch was left for the next
        self._unpaid = False  # whether some gave back their places, for lack of funds
        self._wake = asyncio.Event()
        self._alarm: Timer | None = None
        self._accepting: dict[JobId, asyncio.Future[None] | None] = {}
        self._answers: dict[JobId, Answer] = {}
        self._named = Named(store, self._answers)
        self._peers = Peers()
        self._hearing = Hearing(
            self.pool, self._answers, self._peers, clock, self._post
        )
        self._watch = Watch(self.pool, self._answers, clock, self._post)
        self._acting = Acting(
            self.pool,
            self._answers,
            self._named,
            self._peers,
            self._watch,
            self.blobs,
            self._settle,
            self._post,
        )
        self._witnesses: list[Callable[[Fact], None]] = [FactLog().saw]
        self._wanting_room: list[Callable[[], None]] = []
        self._idle = asyncio.Event()  # set while no job is open
        self._idle.set()
        self._stopping = False
        self._broken: StoreError | None = None

    # For those who want work done.

    @asynccontextmanager
    async def answering(self, job: Job) -> AsyncIterator[Reader]:
        """Have ``job`` done for the length of the block; leaving early cancels it.

        However the block ends, by return, disconnect or error, no worker is left
        working for a client that has gone, unless the job ``goes_on``.  The next who
        asks for the same under the same idempotency key is given the same answer, from
        its beginning, also when it has ended.

        Raises UnknownModel, CannotDo, ContextExceeded, InsufficientFunds, QueueFull,
        KeyReused, ShuttingDown or StoreError before the job is accepted.
        """
        answer = await self._named.answer_to(job) or self._submit(job)
        reading = answer.reading()
        try:
            accepted = self._accepting.get(answer.job_id)
            if accepted is not None:
                # Waited for in a way that leaves it whole for others who wait.
                await asyncio.wait([accepted])
                accepted.result()
            yield reading
        finally:
            answer.leave(reading)
            if not (answer.ended or answer.wanted or job.goes_on):
                self._post(Withdrawn(answer.job_id, "the client left"))

    def place(self, job: Job, asker: Asker) -> None:
        """Have ``job`` done; ``asker`` is told of all that becomes of it.

        Nothing stands under its idempotency key, if it has one: the store is not asked.
        Whoever wants it no more withdraws it.

        Raises what ``answering`` does for a job that can never be done, and KeyReused
        for one whose key is in use now; of one that finds no room the asker is told.
        """
        self._named.check_unused(job)
        self._check(job)
        self._open(Answer(job.id, asker), job)
        self._accepting[job.id] = None

    def room(self, owner: str) -> int:
        """Return how many jobs of an owner may be placed now without being refused."""
        return room(self.pool, owner, self._queue_max) - len(self._accepting)

    def when_room(self, call: Callable[[], None]) -> None:
        """Call once when there may be more room than now."""
        self._wanting_room.append(call)

    async def known(self, job: Job) -> bool:
        """Say whether the same was asked for under the same idempotency key.

        Raises KeyReused if it was something else, StoreError.
        """
        return await self._named.answer_to(job) is not None

    def refusal(self, job: Job) -> ShoalError | None:
        """Say why a job would not be taken now, its price aside; None if it would."""
        hindrance = self._impossible(job)
        return hindrance or hopeless(self.pool, job, self._queue_max)

    @contextmanager
    def watching(self, job_id: JobId) -> Iterator[Reader | None]:
        """Read an open job's answer beside others, without a say in whether it goes on.

        None if the job is not open.
        """
        answer = self._answers.get(job_id)
        if answer is None:
            yield None
            return
        reading = answer.reading(asked=False)
        try:
            yield reading
        finally:
            answer.leave(reading)

    def withdraw_of(self, owner: str, reason: str) -> int:
        """Cancel all open jobs of an owner; return how many there were."""
        jobs = [job.job.id for job in self.pool.jobs.values() if job.job.owner == owner]
        for job_id in jobs:
            self._post(Withdrawn(job_id, reason))
        return len(jobs)

    def withdraw(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; say whether there was one."""
        if job_id not in self._answers:
            return False
        self._post(Withdrawn(job_id, reason))
        return True

    def end_lane(self, job_id: JobId) -> None:
        """Free the slot of a lane whose worker was told that it is over."""
        answer = self._answers.get(job_id)
        if answer is not None and answer.worker_id is not None:
            over = Completed(job_id, answer.lease)
            self._post(Answered(answer.worker_id, over, NOTHING))

    @property
    def ready(self) -> str | None:
        """Say why jobs are not taken, or None if they are."""
        if self._broken is not None:
            return str(self._broken)
        return "stopping" if self._stopping else None

    async def tell(self, stimulus: Stimulus) -> None:
        """Have the hub decide about something; return when that is in the store.

        Raises StoreError.
        """
        if self._broken is not None:
            raise self._broken
        told = asyncio.get_running_loop().create_future()
        self._told.append(told)
        self._post(stimulus)
        await told

    @property
    def books(self) -> Books:
        """What is on which account; whoever reads it changes nothing."""
        return self._clerk.books

    @property
    def public_key(self) -> bytes:
        """What receipts and checkpoints are verified with, 32 bytes."""
        return self._clerk.public_key

    @property
    def healths(self) -> Mapping[WorkerId, Health]:
        """How the workers' machines are, as far as they say so."""
        return self._hearing.healths

    def via(self, worker_id: WorkerId) -> Via | None:
        """Return which peer a worker is a part of, if it is one of several."""
        return self._peers.via(worker_id)

    def watch(self, witness: Callable[[Fact], None]) -> None:
        """Tell ``witness`` of every fact from now on, once it is in the store."""
        self._witnesses.append(witness)

    # For those who speak with workers.

    def connect(self, peer: Peer, wire: str, via: Via | None = None) -> Port:
        """Take note of a connection; its events and its end go to what is returned."""
        return Port(self._hearing, Connection(peer, wire, via=via))

    # For whoever owns the hub.

    async def restore(self) -> int:
        """Take up the books, and the jobs that were open when the last one ended."""
        await self._clerk.open()
        stored = await restore(self.pool, self._store, self._clock)
        for each in stored:
            # Its client is gone, but nobody withdrew it: it is done all the same, and
            # the result can be asked for.
            self._answers[each.job.id] = Answer(each.job.id)
            self._named.add(each.job)
            self._watch.look(each.job.id)
            self.blobs.pin(each.job)
        self._count()
        return len(stored)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._wake.wait()
            if self.pool.waiting >= GATHER_FROM:
                await asyncio.sleep(GATHER)
            self._wake.clear()
            batch, self._mailbox = self._mailbox, []
            told, self._told = self._told, []
            self._put_off = self._unpaid = False
            try:
                decided = self._decide(await self._examiner.examine(batch))
                if not (decided or told or self._recorder.due):
                    self._count()
                    if self._unpaid:
                        self._tell_of_room()  # nothing else may ever happen
                    continue
                kept = [each.fact for each in decided if each.kept]
                if kept or told or self._recorder.due:
                    urgent = not all(map(_can_wait, decided))
                    await self._recorder.record(kept, urgent=urgent)
            except StoreError as error:
                self._told += told
                self._break(error)
                return
            for fact, recalled, _ in decided:
                for witness in self._witnesses:
                    witness(fact)
                self._acting.act(fact, recalled)
            if self._put_off:
                # Theirs may be among what was put off.
                self._told[:0] = told
                told = []
            for each in told:
                if not each.done():
                    each.set_result(None)
            self._count()
            self._tell_of_room()

    async def drain(self) -> None:
        """Take no new jobs, and wait until those that are open have ended."""
        self._stopping = True
        await self._idle.wait()

    def hang_up_all(self, reason: str) -> None:
        """End every worker's connection; they may come back."""
        for peer in self._peers:
            peer.hang_up(reason, GOING_AWAY, reason)

    # Stimuli.

    def _wake_up(self) -> None:
        self._wake.set()

    def _post(self, mail: Mail) -> None:
        # Not bounded here, for everything that posts is: clients by the queue,
        # workers by one joining each and a few words for each lease, and whoever tells
        # the hub something by waiting until it is stored.
        if self._broken is None:
            self._mailbox.append(mail)
            self._wake.set()

    def _submit(self, job: Job) -> Answer:
        self._check(job)
        self._accepting[job.id] = asyncio.get_running_loop().create_future()
        return self._open(Answer(job.id), job)

    def _check(self, job: Job) -> None:
        if (error := self._impossible(job)) is not None:
            raise error

    def _open(self, answer: Answer, job: Job) -> Answer:
        self._answers[job.id] = answer
        self._named.add(job)
        self.blobs.pin(job)
        self._idle.clear()
        self._post(Submitted(job))
        return answer

    def _tell_of_room(self) -> None:
        wanting, self._wanting_room = self._wanting_room, []
        for call in wanting:
            call()

    def _impossible(self, job: Job) -> ShoalError | None:
        if self._broken is not None:
            return self._broken
        if self._stopping:
            return ShuttingDown("the coordinator is stopping: try again shortly")
        return impossible(self.pool, job, self._clock.now())

    # Decisions.

    def _decide(self, batch: list[Stimulus]) -> list[Decided]:
        """Apply what follows from a batch, leases last; return the facts."""
        now, at = self._clock.now(), self._clock.wall()
        decided: list[Decided] = []

        def apply(fact: Fact) -> None:
            fact = self._with_size(fact)
            kept = is_kept(fact, self.pool)
            decided.append(Decided(fact, recalls(self.pool, fact), kept))
            self._clerk.note(fact, at)
            self.pool.apply(fact, now)

        for index, stimulus in enumerate(batch):
            if isinstance(stimulus, Submitted):
                job = stimulus.job
                unpaid = self._clerk.refusal(job)
                full = hopeless(self.pool, job, self._queue_max)
                self._unpaid |= unpaid is not None
                if unpaid is None and full is not None and plan(self.pool):
                    # The queue is full only because a burst was not given out yet.  No
                    # lease ends in the batch that it begins in, so the rest waits.
                    self._mailbox[:0] = batch[index:]
                    self._put_off = True
                    self._wake.set()
                    break
                if (error := unpaid or full) is not None:
                    self._refuse(job, error)
                    continue
            for fact in react(self.pool, stimulus):
                apply(fact)
        alarms = [self.pool.forgive(now)]
        for lease in plan(self.pool):
            apply(lease)
        if self._hedge_after is not None:
            for hedge in hedges(self.pool, now, self._hedge_after):
                apply(hedge)
            alarms.append(next_hedge(self.pool, now, self._hedge_after))
        self._set_alarm([when for when in alarms if when is not None])
        return decided

    def _with_size(self, fact: Fact) -> Fact:
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
        self._answers[job.id].fail(error)
        self._acting.forget(job.id)
        self._settle(job.id, error)

    def _settle(self, job_id: JobId, error: ShoalError | None = None) -> None:
        """Tell whoever submitted the job whether it was accepted."""
        accepted = self._accepting.pop(job_id)
        if accepted is None:
            asker = self._answers[job_id].asker if error is None else None
            if asker is not None:
                asker.accepted(job_id)
        elif error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)
            accepted.exception()  # whoever asked may have left: that is no fault

    def _count(self) -> None:
        if self.pool.jobs or self._accepting:
            self._idle.clear()
        else:
            self._idle.set()

    def _break(self, error: StoreError) -> None:
        log.error("store failed, no more work is taken until a restart: %s", error)
        self._broken = error
        for job_id in list(self._accepting):
            self._settle(job_id, error)
        for told in self._told:
            if not told.done():  # else whoever told it has left
                told.set_exception(error)
        for answer in self._answers.values():
            answer.fail(error)
        self._watch.stop()
        self._idle.set()  # nothing that is open will ever end


def _can_wait(decided: Decided) -> bool:
    """Say whether nothing hangs on a fact's being stored at once."""
    return not decided.kept or (can_wait(decided.fact) and not decided.recalled)
