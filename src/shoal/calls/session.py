"""One client's function calls, as messages say them.

Calls in memory go through call streams, and so do durable calls, which are stored as
well (``durable``).  Calls that have a price, report their progress or belong to a gang
are jobs of the pool.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from shoal.calls import messages
from shoal.calls.durable import DurableCalls
from shoal.calls.group import CallRoute
from shoal.calls.messages import SendQueue
from shoal.calls.scheduler import CallScheduler
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.backlog import Backlog, QueueReservation
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.domain import errors
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import PRIORITIES, Gang, Job, JobTerms, Priority
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream, Feature
from shoal.pool.functions import (
    CALL_QUEUE_SECONDS,
    CALL_TOTAL_SECONDS,
    GANG_TOTAL_SECONDS,
    call_limits,
)
from shoal.transports.clock import Clock


class JobReporter:
    """Reports a job's progress to its client, under the client's number for it."""

    __slots__ = ("_client", "_number", "_progress")

    def __init__(self, client: "CallSession", number: int, *, progress: bool) -> None:
        self._client = client
        self._number = number
        self._progress = progress

    def on_accepted(self, job_id: JobId) -> None:
        self._client.send((messages.ACCEPTED, self._number, job_id))

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        self.on_started(job_id, lease)

    def on_started(self, job_id: JobId, lease: LeaseNumber) -> None:
        self._client.send((messages.STARTED, self._number, lease))

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        if self._progress:
            self._client.send((messages.PROGRESS, self._number, share, remark))

    def on_results(self, returns: list[CallResult]) -> None:
        pass  # only call streams return results in this route

    def on_end(self, job: EndedJob) -> None:
        self._client.job_ended(self._number, job)

    def runs(self, number: int) -> bool:
        return False  # it is no call stream


OPEN_MAX = 1 << 16  # open calls of one client, running or waiting
OPEN_SIZE_MAX = 64 << 20  # bytes of their arguments; the last one may exceed it
ROUTES_MAX = 1024  # cached routes of one client
LOOKUPS_MAX = 64  # concurrent look-ups in the store: writes wait behind them
INLINE_MAX = 1 << 20  # bytes of a result that is sent inline; larger ones are blobs

TaskStarter: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
CountCalls: TypeAlias = Callable[[bool, int], None]
"""Receives whether the ended calls are durable, and their number."""

RouteKey: TypeAlias = tuple[object, ...]
NOTHING: Mapping[str, object] = {}
CLIENT_LEFT = "the client left"
TOO_MANY_CALLS = (
    f"{OPEN_MAX} calls of this connection are open, or {OPEN_SIZE_MAX >> 20} MiB of "
    "their arguments: call again when some have ended"
)
CANCELLED_BY_OWNER = "cancelled by its owner"


class CallAccess(Protocol):
    """The access of one client's API key."""

    @property
    def name(self) -> str:
        """The owner of its calls."""

    def ensure_active(self) -> None:
        """Raise KeyRevoked or KeyExpired if the key has ended."""

    def permitted_priority(self, wanted: Priority | None) -> Priority:
        """Return the priority of a call; None: it names none.  Raises Forbidden."""

    def count_call(self) -> None:
        """Count a call as a request.  Raises KeyRevoked or RateLimited."""

    def submit(self, job: Job) -> AbstractAsyncContextManager[AnswerCursor]:
        """Run a job, within the key's limits, for the length of the block."""

    def on_submitted(self, job_id: JobId) -> None:
        """A durable call was submitted."""


class CallSession:
    """One connection's calls, by the numbers that the client gave them.

    Args:
        access: the client's, which names the owner of the calls.
        price: of one call, in micro-dollars.
        start_task: starts a task that ends with the connection.
        queue: holds what is to be sent to the client.
        count: receives the number of calls that have ended.
    """

    def __init__(
        self,
        hub: Hub,
        durable: DurableCalls,
        clock: Clock,
        access: CallAccess,
        price: int,
        start_task: TaskStarter,
        queue: SendQueue,
        count: CountCalls,
    ) -> None:
        self._hub = hub
        self._durable = durable
        self._access = access
        self._start_task = start_task
        self._queue = queue
        self._count = count
        self._scheduler = CallScheduler(hub, clock, access.name, self)
        self._price = price
        self._terms = JobTerms(price=price)
        self._routes: dict[RouteKey, CallRoute] = {}
        self._sizes: dict[int, int] = {}  # bytes of all open calls, by number
        self._size = 0
        self._backlog = Backlog(hub, access.name)  # jobs of the pool that wait for room
        self._jobs: dict[int, JobId] = {}  # of durable calls, by number
        self._keyed: dict[int, asyncio.Task[None]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self._outliving: set[int] = set()  # durable calls that survive their client

    def receive(
        self, items: Sequence[messages.CallItem | messages.InvalidItem]
    ) -> None:
        """Handle the items of one message.

        Raises KeyRevoked if the client's key was revoked.
        """
        self._access.ensure_active()
        for item in items:
            match item:
                case messages.CallRequest():
                    try:
                        self._call(item)
                    except errors.ShoalError as error:
                        self.send(messages.failure_item(item.number, error, NOTHING))
                        errors.release_frames(error)
                case messages.CancelCall(number):
                    self._cancel(number)
                case messages.InvalidItem(number, wrong):
                    self.send(messages.failure_item(number, wrong, NOTHING))
        self._scheduler.flush()
        self._durable.flush(self._access.name)
        self._backlog.flush()

    def close(self) -> None:
        """Cancel the calls of a client that has left, except those with a key."""
        self._queue.close()
        self._scheduler.close()
        self._backlog.clear()
        for number, job_id in self._jobs.items():
            if number not in self._keyed and number not in self._outliving:
                self._hub.cancel(job_id, CLIENT_LEFT)
        for task in self._keyed.values():
            task.cancel()

    # Items from the client.

    def _call(self, request: messages.CallRequest) -> None:
        if request.number in self._sizes:
            raise errors.InvalidRequest(
                f"call {request.number} has not ended: number each anew"
            )
        if len(self._sizes) >= OPEN_MAX or self._size >= OPEN_SIZE_MAX:
            # Rejected, not left unread: cancellations come on the same connection.
            raise errors.QueueFull(TOO_MANY_CALLS)
        key = _route_key(request)
        route = self._routes.get(key) or self._new_route(request, key)
        terms = self._terms_of(request)
        self._access.count_call()
        size = len(request.args) + len(request.kwargs)
        self._sizes[request.number] = size
        self._size += size
        if request.options.key and not request.options.fresh:
            keyed = self._start_task(self._run_keyed(request, route, terms))
            self._keyed[request.number] = keyed
        elif self._is_pool_job(request):
            submit = partial(self._submit, request, route, terms)
            self._backlog.add(request.number, submit)
        elif request.options.kept:
            self._submit_durable(request, route, terms)
        else:
            call = StreamedCall(request.number, request.args, request.kwargs)
            self._scheduler.submit(route, call, request.options.blobs)

    def _new_route(self, request: messages.CallRequest, key: RouteKey) -> CallRoute:
        options = request.options
        try:
            needs = frozenset(Feature(each) for each in options.needs)
        except ValueError as error:
            raise errors.InvalidRequest(f"needs: {error}", "needs") from error
        if options.priority not in PRIORITIES:
            expected = ", ".join(PRIORITIES)
            text = f"priority: expected one of {expected}, got {options.priority!r}"
            raise errors.InvalidRequest(text, "priority")
        wanted = PRIORITIES[options.priority]
        priority = self._access.permitted_priority(
            None if wanted is Priority.NORMAL else wanted  # the default
        )
        named = request.name, options.timeout, needs
        stream = CallStream(*named, options.python, options.exact)
        queue = options.queue or CALL_QUEUE_SECONDS
        route = CallRoute(stream, priority, queue, options.wait)
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[key] = route
        return route

    def _cancel(self, number: int) -> None:
        if (job_id := self._jobs.get(number)) is not None:
            self._hub.cancel(job_id, CANCELLED_BY_OWNER)  # the job reports its end
            return
        recalled = self._backlog.remove(number)
        if (keyed := self._keyed.pop(number, None)) is not None:
            recalled = keyed.cancel()
        if recalled or self._scheduler.cancel(number):
            self.on_failure(number, errors.Cancelled(CANCELLED_BY_OWNER))

    # Durable calls.

    def _is_pool_job(self, request: messages.CallRequest) -> bool:
        """Say whether the pool runs a call.

        Streams carry no receipts, nor progress, and hold one slot at a time.
        """
        options = request.options
        return bool(self._price) or options.progress or options.gang is not None

    def _terms_of(self, request: messages.CallRequest) -> JobTerms:
        """Return the terms of a call.  Raises InvalidRequest."""
        gang = request.options.gang
        if gang is None:
            wait = request.options.wait
            return replace(self._terms, waits=True) if wait else self._terms
        if not request.options.kept:
            raise errors.InvalidRequest("gang: requires a durable call", "gang")
        known = Gang(gang.id, gang.rank, gang.size, gang.least, gang.slots)
        return replace(self._terms, gang=known)

    def _submit_durable(
        self, request: messages.CallRequest, route: CallRoute, terms: JobTerms
    ) -> None:
        try:
            job = self._job(request, route, terms)
            self._durable.submit(job, route, self._reporter(request))
        except errors.ShoalError as error:
            self.on_failure(request.number, error)
            errors.release_frames(error)
        else:
            self._add_job(request.number, job)

    def _reporter(self, request: messages.CallRequest) -> JobReporter:
        return JobReporter(self, request.number, progress=request.options.progress)

    def _add_job(self, number: int, job: Job) -> None:
        self._jobs[number] = job.id
        self._access.on_submitted(job.id)
        if job.idempotency_key:
            self._outliving.add(number)

    def _submit(
        self, request: messages.CallRequest, route: CallRoute, terms: JobTerms
    ) -> None:
        try:
            job = self._job(request, route, terms)
            self._hub.submit(job, self._reporter(request))
        except errors.ShoalError as error:
            self.on_failure(request.number, error)
            errors.release_frames(error)
        else:
            self._add_job(request.number, job)

    def _job(
        self, request: messages.CallRequest, route: CallRoute, terms: JobTerms
    ) -> Job:
        options, stream = request.options, route.stream
        total = CALL_TOTAL_SECONDS if terms.gang is None else GANG_TOTAL_SECONDS
        if lacking := self._hub.blobs.missing(options.blobs):
            raise errors.NotFound(" ".join(digest.hex() for digest in lacking))
        return Job(
            self._hub.new_id(),
            Call(
                request.name,
                request.args,
                request.kwargs,
                stream.timeout,
                stream.needs,
                options.blobs,
                stream.python,
                stream.exact,
            ),
            call_limits(stream.timeout, route.queue, total),
            self._access.name,
            route.priority,
            idempotency_key=options.key,
            terms=terms,
        )

    async def _run_keyed(
        self, request: messages.CallRequest, route: CallRoute, terms: JobTerms
    ) -> None:
        """Run a call with an idempotency key, or attach to the job that has it."""
        number = request.number
        try:
            job = self._job(request, route, terms)
            if self._attach(request, job):
                return
            async with self._lookups:
                known = await self._hub.is_duplicate(job)
            if self._attach(request, job):
                return
            if not known and not self._is_pool_job(request):
                self._submit_durable(request, route, terms)
                self._durable.flush(job.owner)
                return
            # An existing job needs no room in the queue.
            answered = known and await self._submit_keyed(number, job)
            refused = False
            while not answered:
                reservation = await self._backlog.reserve(number, again=refused)
                try:
                    answered = await self._submit_keyed(number, job, reservation)
                    refused = not answered
                    reservation.release(refused=refused)
                finally:
                    reservation.release()
        except errors.ShoalError as error:
            self.on_failure(number, error)
            errors.release_frames(error)
        finally:
            self._keyed.pop(number, None)

    def _attach(self, request: messages.CallRequest, job: Job) -> bool:
        """Follow the open durable call with the job's key, if there is one.

        Raises KeyReused.
        """
        number = request.number
        known = self._durable.attach(job, self._reporter(request))
        if known is not None:
            self._jobs[number] = known
            self._outliving.add(number)
        return known is not None

    async def _submit_keyed(
        self, number: int, job: Job, reservation: QueueReservation | None = None
    ) -> bool:
        """Submit a job and report its outcome; return False if the queue is full.

        ``reservation`` is released once the job is accepted.
        """
        accepted = False
        try:
            async with self._access.submit(job) as reader:
                accepted = True
                if reservation is not None:
                    reservation.release()
                self._jobs[number] = reader.job_id
                self.send((messages.ACCEPTED, number, reader.job_id))
                outcome = await reader.outcome()
                meta = _meta(
                    reader.job_id, reader.answer.worker_id, reader.answer.lease
                )
                self._send_outcome(number, outcome, meta)
        except errors.QueueFull:
            if accepted:
                raise
        return accepted

    # Items to the client.

    def send(self, item: messages.ReplyItem) -> None:
        self._queue.put(item)

    def job_ended(self, number: int, job: EndedJob) -> None:
        meta = _meta(job.job_id, job.worker_id, job.lease)
        match job.end:
            case Outcome() as outcome:
                self._send_outcome(number, outcome, meta)
            case errors.ShoalError() as error:
                self.send(messages.failure_item(number, error, meta))
                self._forget(number)
            case None:
                raise AssertionError("the job has not ended")
        self._count(True, 1)

    def on_pushed(self, numbers: Sequence[int], worker_id: WorkerId) -> None:
        pass  # clients of calls in memory receive results only

    def on_requeued(self, numbers: Sequence[int], reason: str, *, lost: bool) -> None:
        pass

    def on_results(self, returns: Iterable[CallResult]) -> None:
        count = 0
        for each in returns:
            count += 1
            if len(each.value) > INLINE_MAX and not each.error:
                self._start_task(self._send_as_blob(each.number, each.value, {}))
            else:
                self.send(messages.return_item(each))
            self._forget(each.number)
        self._count(False, count)

    def on_failure(self, number: int, error: errors.ShoalError) -> None:
        self.send(messages.failure_item(number, error, NOTHING))
        self._forget(number)

    def _send_outcome(
        self, number: int, outcome: Outcome, meta: dict[str, object]
    ) -> None:
        value = outcome.value
        if not value and outcome.blobs:  # the result is stored as a blob
            meta["value"] = outcome.blobs[0].hex()
        if len(value) > INLINE_MAX:
            self._start_task(self._send_as_blob(number, value, meta))
        else:
            self.send((messages.DONE, number, value, meta))
        self._forget(number)

    async def _send_as_blob(
        self, number: int, value: bytes, meta: dict[str, object]
    ) -> None:
        """Store a large result, and send its digest."""
        try:
            digest = await self._hub.blobs.keep(value, owner=self._access.name)
        except errors.ShoalError as error:
            self.send(messages.failure_item(number, error, meta))
        else:
            self.send((messages.DONE, number, b"", {**meta, "value": digest.hex()}))

    def _forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        self._outliving.discard(number)
        self._size -= self._sizes.pop(number, 0)


def _route_key(request: messages.CallRequest) -> RouteKey:
    """Return the options that determine a call's route."""
    options = request.options
    terms = options.needs, options.priority, options.queue, options.python
    return request.name, options.timeout, *terms, options.exact, options.wait


def _meta(job_id: JobId, worker: str | None, attempts: int) -> dict[str, object]:
    return {"job": job_id, "worker": worker, "attempts": attempts}
