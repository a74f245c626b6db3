"""Durable calls: stored jobs that call streams carry.

The pool knows the streams only.  A call is on disk before its client learns that it was
accepted, and its result before the client gets it.  It may run while the first write is
under way: a call that loses its worker runs again in any case.

After a restart, the calls that had not ended are jobs of the pool like any other.
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from shoal.calls.group import CallRoute
from shoal.calls.scheduler import CallScheduler
from shoal.coordinator.answer import Answer, EndedJob
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.hub import Hub
from shoal.coordinator.open_answers import check_same_request, error_of
from shoal.domain import errors, facts
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.vocabulary import CallName, CallResult, StreamedCall
from shoal.domain.work import Call
from shoal.pool.open_job import NO_LEASE
from shoal.store.port import RecordedFact, Store, commit_ids
from shoal.transports.clock import Clock, Timer

OWNER_OPEN_MAX = 1 << 17  # open calls of one owner
OWNER_SIZE_MAX = 256 << 20  # bytes of their arguments; the last one may exceed it
ACCEPT_WITHIN = 0.002  # seconds that the write of a new call waits for its result
LEASED_AFTER = 0.05  # seconds at a worker after which a lease is recorded
CARRIED = "a call stream of the function"  # why a worker got a call
TOO_MANY = (
    f"{OWNER_OPEN_MAX} durable calls of this key are open, or "
    f"{OWNER_SIZE_MAX >> 20} MiB of their arguments: call again when some have ended"
)


Carrier: TypeAlias = tuple[JobId, LeaseNumber, int]


class DurableCallListener(Protocol):
    """Callbacks for the events of a durable call.  They must neither wait nor raise."""

    def on_accepted(self, job_id: JobId) -> None:
        """The call is in the store."""

    def on_started(self, job_id: JobId, lease: LeaseNumber) -> None:
        """A worker has had the call for a while."""

    def on_end(self, job: EndedJob) -> None:
        """The call has ended, and its end is in the store."""


@dataclass(slots=True, eq=False)
class DurableCall:
    """A call that has not ended, or whose end is being written.

    ``lease`` counts the leases that were recorded.  ``pushed_at`` is when the present
    worker got it, in Unix seconds.
    """

    job: Job
    number: int
    listeners: list[DurableCallListener]
    size: int
    lease: LeaseNumber = NO_LEASE
    worker_id: WorkerId | None = None
    pushed_at: float = 0.0
    kept: bool = False  # whether that runs it on if its connection is lost
    accepted: bool = False
    end: Outcome | errors.ShoalError | None = None
    answer: Answer | None = None  # for those who wait for the result over HTTP

    @property
    def job_id(self) -> JobId:
        return self.job.id

    @property
    def next_name(self) -> CallName:
        """How its next worker knows it."""
        return self.job.id, LeaseNumber(self.lease + 1)


@dataclass(slots=True)
class _Owner:
    """The open calls of one owner."""

    scheduler: CallScheduler
    calls: dict[JobId, DurableCall] = field(default_factory=dict)
    size: int = 0  # bytes of their arguments


class DurableCalls:
    """All durable calls of a coordinator.  ``run`` records their ends and leases.

    Whatever happens during a write goes into the next one, so that a burst of calls
    shares its commits.  New calls wait a moment for their results, so that a short call
    is written once.
    """

    def __init__(self, hub: Hub, store: Store, clock: Clock) -> None:
        self._hub = hub
        self._store = store
        self._clock = clock
        self._numbers = itertools.count()
        self._owners: dict[str, _Owner] = {}
        self._calls: dict[int, DurableCall] = {}  # that have not ended
        self._jobs: dict[JobId, DurableCall] = {}  # also while the end is written
        self._keys: dict[tuple[str, str], DurableCall] = {}
        self._unrecorded: dict[int, DurableCall] = {}  # at a worker, without a lease
        self._timer: Timer | None = None
        self._write_timer: Timer | None = None
        self._facts: list[RecordedFact] = []
        self._changed: list[tuple[DurableCall, bool]] = []  # accepted, or ended
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._writing = False
        self._stopping = False
        self._health = hub.store_health
        self._health.subscribe(self)

    # For clients.

    def submit(self, job: Job, route: CallRoute, listener: DurableCallListener) -> None:
        """Accept a call; ``flush`` sends it to a worker.

        Its idempotency key, if any, must not be in use: the store is not searched.

        Raises what ``Hub.submit`` does.
        """
        work = job.work
        assert isinstance(work, Call), "only calls are carried by call streams"
        if self._stopping:
            raise errors.ShuttingDown("the coordinator is stopping: try again shortly")
        if (error := self._hub.permanent_rejection(job)) is not None:
            raise error
        if job.idempotency_key:
            self._check_unused(job)
        owner = self._owners.get(job.owner) or self._new_owner(job.owner)
        if len(owner.calls) >= OWNER_OPEN_MAX or owner.size >= OWNER_SIZE_MAX:
            raise errors.QueueFull(TOO_MANY)
        size = len(work.args) + len(work.kwargs)
        call = DurableCall(job, next(self._numbers), [listener], size)
        owner.calls[job.id] = call
        owner.size += size
        self._calls[call.number] = self._jobs[job.id] = call
        if job.idempotency_key:
            self._keys[job.owner, job.idempotency_key] = call
        self._hub.blobs.pin(job)
        self._facts.append(RecordedFact(self._clock.wall(), facts.JobSubmitted(job)))
        self._changed.append((call, False))
        if self._write_timer is None:
            due = self._clock.now() + ACCEPT_WITHIN
            self._write_timer = self._clock.call_at(due, self._wake.set)
        streamed = StreamedCall(call.number, work.args, work.kwargs)
        owner.scheduler.submit(route, streamed, work.blobs, call.next_name)

    @property
    def open_count(self) -> int:
        """The number of calls that have not ended, or whose end is being written."""
        return len(self._jobs)

    def flush(self, owner: str) -> None:
        """Send the waiting calls of an owner to workers."""
        if (known := self._owners.get(owner)) is not None:
            known.scheduler.flush()

    def attach(self, job: Job, listener: DurableCallListener) -> JobId | None:
        """Listen to the open call with the same idempotency key, if there is one.

        Returns its id.  Raises KeyReused if it requests something else.
        """
        call = self._keys.get((job.owner, job.idempotency_key))
        if call is None:
            return None
        check_same_request(job, call.job)
        call.listeners.append(listener)
        if call.accepted:
            listener.on_accepted(call.job_id)
        return call.job_id

    # As ``CarriedJobs``, for the hub.

    def has(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a call; return whether it was open."""
        call = self._jobs.get(job_id)
        if call is None or call.end is not None:
            return False
        self._owners[call.job.owner].scheduler.cancel(call.number)
        self._end(call, errors.Cancelled(reason), facts.JobCancelled(job_id, reason))
        return True

    def cancel_all_of(self, owner: str, reason: str) -> int:
        """Cancel all open calls of an owner; return their number."""
        known = self._owners.get(owner)
        if known is None:
            return 0
        return sum(self.cancel(each, reason) for each in list(known.calls))

    @contextmanager
    def observe(self, job_id: JobId) -> Iterator[AnswerCursor | None]:
        """Read a call's result; None if the call is not open."""
        call = self._jobs.get(job_id)
        if call is None:
            yield None
            return
        answer = call.answer = call.answer or Answer(job_id)
        reader = answer.open_reader(counts=False)
        try:
            yield reader
        finally:
            answer.remove_reader(reader)

    async def stored(self) -> None:
        """Wait until all that has happened so far is in the store.

        Raises StoreError.
        """
        if self._health.is_broken and self._health.failure is not None:
            raise self._health.failure
        if self._facts or self._writing:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._wake.set()
            await future

    # For the owner of the calls.

    async def run(self) -> None:
        """Record ends and leases until cancelled."""
        commits = commit_ids(self._hub.epoch, "calls")
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            batch, self._facts = self._facts, []
            changed, self._changed = self._changed, []
            waiting, self._waiting = self._waiting, []
            self._writing = True
            try:
                commit, at = next(commits), self._clock.wall()
                await self._health.write(
                    partial(self._store.append, (), at, batch, commit=commit)
                )
            except errors.StoreError as error:
                self._waiting += waiting
                self.on_store_broken(error)
                return
            finally:
                self._writing = False
            self._hub.publish([each.fact for each in batch])
            for call, ended in changed:
                self._report_end(call) if ended else self._report_accepted(call)
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def stop(self) -> None:
        """Accept no more calls, and send no more to workers.

        Those that wait are in the store, and run after the next start.
        """
        self._stopping = True
        for owner in self._owners.values():
            owner.scheduler.pause()

    # As ``CallListener``, for the schedulers.

    def on_pushed(self, numbers: Sequence[int], worker_id: WorkerId) -> None:
        now = self._clock.wall()
        worker = self._hub.pool.workers.get(worker_id)
        kept = worker is not None and worker.keeps_jobs
        for number in numbers:
            call = self._calls[number]
            call.worker_id, call.pushed_at, call.kept = worker_id, now, kept
            self._unrecorded[number] = call
        self._set_timer()

    def on_requeued(self, numbers: Sequence[int], reason: str, *, lost: bool) -> None:
        for number in numbers:
            call = self._calls[number]
            if lost:
                self._record_lease(call, goes_on=True)
            elif self._unrecorded.pop(number, None) is not None:
                continue  # no client has seen that lease
            self._record(facts.JobRequeued(call.job_id, call.lease, reason))

    def on_results(self, results: Iterable[CallResult]) -> None:
        for number, value, error in results:
            call = self._calls[number]
            self._record_lease(call)
            job_id = call.job_id
            if error:
                failed = facts.JobFailed(job_id, error, exception=value)
                self._end(call, error_of(failed), failed)
            else:
                outcome = Outcome("", value=value)
                self._end(
                    call, outcome, facts.JobCompleted(job_id, call.lease, outcome)
                )

    def on_failure(self, number: int, error: errors.ShoalError) -> None:
        call = self._calls[number]
        if not isinstance(error, errors.NoWorker):
            self._record_lease(call)
        self._end(call, error, _failure(call.job_id, error))

    # Private parts.

    def _new_owner(self, name: str) -> _Owner:
        scheduler = CallScheduler(self._hub, self._clock, name, self)
        owner = self._owners[name] = _Owner(scheduler)
        return owner

    def _check_unused(self, job: Job) -> None:
        self._hub.check_unused(job)
        if (job.owner, job.idempotency_key) in self._keys:
            raise errors.KeyReused(
                "the idempotency key was marked as fresh, but is in use"
            )

    def _record(self, fact: facts.JobFact) -> None:
        self._facts.append(RecordedFact(self._clock.wall(), fact))
        self._wake.set()

    def _record_lease(self, call: DurableCall, *, goes_on: bool = False) -> None:
        """Record that the present worker has the call, unless that is recorded."""
        if self._unrecorded.pop(call.number, None) is None:
            return
        assert call.worker_id is not None, "a worker has the call"
        call.lease = LeaseNumber(call.lease + 1)
        lease = facts.JobLeased(call.job_id, call.worker_id, call.lease, CARRIED)
        if goes_on:
            carrier = self._carrier_of(call)
            lease = replace(lease, kept=call.kept, carrier=carrier)
            self._owners[call.job.owner].scheduler.rename(call.number, call.next_name)
        self._facts.append(RecordedFact(call.pushed_at, lease))
        self._wake.set()

    def _carrier_of(self, call: DurableCall) -> Carrier | None:
        """Return the stream that has a call, as the call's own calls know it."""
        stream = self._owners[call.job.owner].scheduler.stream_of(call.number)
        known = None if stream is None else self._hub.pool.jobs.get(stream)
        if stream is None or known is None:
            return None
        return stream, known.run_since, call.number

    def _end(
        self, call: DurableCall, end: Outcome | errors.ShoalError, fact: facts.JobFact
    ) -> None:
        call.end = end
        del self._calls[call.number]
        self._unrecorded.pop(call.number, None)
        owner = self._owners[call.job.owner]
        del owner.calls[call.job_id]
        owner.size -= call.size
        self._record(fact)
        self._changed.append((call, True))

    def _report_accepted(self, call: DurableCall) -> None:
        call.accepted = True
        for listener in call.listeners:
            listener.on_accepted(call.job_id)

    def _report_end(self, call: DurableCall) -> None:
        """Report an end that is stored, and release what the call holds."""
        del self._jobs[call.job_id]
        if call.job.idempotency_key:
            del self._keys[call.job.owner, call.job.idempotency_key]
        self._hub.blobs.unpin(call.job_id)
        for listener in call.listeners:
            listener.on_end(call)
        if call.answer is not None and call.end is not None:
            call.answer.finish(call.end)

    def _set_timer(self) -> None:
        if self._timer is None and self._unrecorded:
            due = self._clock.now() + LEASED_AFTER
            self._timer = self._clock.call_at(due, self._record_leases)

    def _record_leases(self) -> None:
        """Record the leases of calls that a worker has had for a while."""
        self._timer = None
        before = self._clock.wall() - LEASED_AFTER
        for call in list(self._unrecorded.values()):
            if call.pushed_at > before:
                break  # in the order in which they were pushed
            self._record_lease(call, goes_on=True)
            for listener in call.listeners:
                listener.on_started(call.job_id, call.lease)
        self._set_timer()

    # As ``StoreHealthListener``.

    def on_store_failing(self, error: errors.StoreError) -> None:
        """Send no more calls to workers.

        Those that workers have end; their results wait in memory until they are stored.
        """
        for owner in self._owners.values():
            owner.scheduler.hold()

    def on_store_retried(self, error: errors.StoreError) -> None:
        pass  # the clients of calls wait

    def on_store_healed(self) -> None:
        for owner in self._owners.values():
            owner.scheduler.resume()

    def on_store_broken(self, error: errors.StoreError) -> None:
        """End all calls with the error; after a restart they go on."""
        for owner in self._owners.values():
            owner.scheduler.close()
        jobs, self._jobs = self._jobs, {}
        for call in jobs.values():
            call.end = error
            for listener in call.listeners:
                listener.on_end(call)
            if call.answer is not None:
                call.answer.finish(error)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _failure(job_id: JobId, error: errors.ShoalError) -> facts.JobFact:
    """Return the fact of a call that ended without a result."""
    match error:
        case errors.NoWorker():
            return facts.JobExpired(job_id, TimeLimit.QUEUE, str(error))
        case errors.TimedOut():
            return facts.JobExpired(job_id, TimeLimit.FIRST_OUTPUT, str(error))
        case errors.WorkerLost():
            return facts.JobFailed(job_id, str(error), lost=True)
        case _:
            return facts.JobFailed(job_id, str(error), fault=Fault.REQUEST)
