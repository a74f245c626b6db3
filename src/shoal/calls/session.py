"""One client's function calls: each becomes a job or goes through a call stream.

A durable call is a stored job; its client hears of every step of it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol, TypeAlias

from shoal.calls.group import CallRoute
from shoal.calls.messages import (
    ACCEPTED,
    DONE,
    PROGRESS,
    STARTED,
    CallItem,
    CallRequest,
    CancelCall,
    InvalidItem,
    ReplyItem,
    failure_item,
    return_item,
)
from shoal.calls.scheduler import CallScheduler
from shoal.calls.send_queue import SendQueue
from shoal.coordinator.answer_reader import AnswerStream
from shoal.coordinator.backlog import Backlog, QueueReservation
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.coordinator.job_listener import EndedJob
from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    QueueFull,
    ShoalError,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import (
    PRIORITIES,
    Call,
    CallStream,
    Feature,
    Job,
    JobTerms,
)
from shoal.pool.functions import CALL_QUEUE_SECONDS, call_limits
from shoal.transports.clock import Clock


class CallClient(Protocol):
    """Who made a call."""

    def send(self, item: ReplyItem) -> None:
        """Tell the client something."""
        ...

    def job_ended(self, number: int, job: EndedJob) -> None:
        """Tell the client how a call ended."""
        ...


class DurableCall:
    """Passes on what becomes of a job, under the number that its client gave it."""

    __slots__ = ("_client", "_number", "_progress")

    def __init__(self, client: CallClient, number: int, *, progress: bool) -> None:
        self._client = client
        self._number = number
        self._progress = progress

    def on_accepted(self, job_id: JobId) -> None:
        self._client.send((ACCEPTED, self._number, job_id))

    def on_leased(
        self, job_id: JobId, lease: LeaseNumber, peer: WorkerConnection
    ) -> None:
        self._client.send((STARTED, self._number, lease))

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        if self._progress:
            self._client.send((PROGRESS, self._number, share, remark))

    def on_results(self, returns: list[CallResult]) -> None:
        pass  # only lanes return so

    def on_end(self, job: EndedJob) -> None:
        self._client.job_ended(self._number, job)


OPEN_MAX = 1 << 16  # calls of one client that are being made, or wait here
OPEN_SIZE_MAX = 64 << 20  # bytes of their arguments; one more is always taken
ROUTES_MAX = 1024  # kinds of calls of one client that are remembered
LOOKUPS_MAX = 64  # in the store at a time: what is to be written waits behind them
INLINE_MAX = 1 << 20  # bytes from which on a value is fetched, and not said

TaskStarter: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
CountCalls: TypeAlias = Callable[[bool, int], None]
"""Takes whether calls were kept, and how many have ended."""

RouteKey: TypeAlias = tuple[str, float | None, tuple[str, ...], str, float | None]
NOTHING: Mapping[str, object] = {}
CLIENT_LEFT = "the client left"
TOO_MANY_CALLS = (
    f"{OPEN_MAX} calls of this connection are open, or {OPEN_SIZE_MAX >> 20} MiB of "
    "their arguments: call again when some have ended"
)
CANCELLED_BY_OWNER = "cancelled by its owner"


class CallAccess(Protocol):
    """What one client may do under its API key."""

    @property
    def name(self) -> str:
        """The owner of its calls."""
        ...

    def ensure_active(self) -> None:
        """Raise KeyRevoked if the key was revoked."""
        ...

    def count_call(self) -> None:
        """Count a call as a request.  Raises KeyRevoked or RateLimited."""
        ...

    def submit(self, job: Job) -> AbstractAsyncContextManager[AnswerStream]:
        """Run a job, within the key's limits, for the length of the block."""
        ...


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
        clock: Clock,
        access: CallAccess,
        price: int,
        start_task: TaskStarter,
        queue: SendQueue,
        count: CountCalls,
    ) -> None:
        self._hub = hub
        self._access = access
        self._start_task = start_task
        self._queue = queue
        self._count = count
        self._board = CallScheduler(hub, clock, access.name, self)
        self._price = price
        self._terms = JobTerms(price=price)
        self._routes: dict[RouteKey, CallRoute] = {}
        self._sizes: dict[int, int] = {}  # of all open calls, in bytes
        self._size = 0
        self._backlog = Backlog(hub, access.name)  # to be kept
        self._jobs: dict[int, JobId] = {}  # of those that are
        self._keyed: dict[int, asyncio.Task[None]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self._outliving: set[int] = set()  # those that go on without their client

    def receive(self, items: Sequence[CallItem | InvalidItem]) -> None:
        """Take what the client says in one message.

        Raises KeyRevoked if it may say nothing more.
        """
        self._access.ensure_active()
        for item in items:
            match item:
                case CallRequest():
                    try:
                        self._call(item)
                    except ShoalError as error:
                        self.send(failure_item(item.number, error, NOTHING))
                case CancelCall(number):
                    self._cancel(number)
                case InvalidItem(number, wrong):
                    self.send(failure_item(number, wrong, NOTHING))
        self._board.flush()
        self._backlog.flush()

    def close(self) -> None:
        """Make no more calls but those that are to go on: the client has left."""
        self._queue.close()
        self._board.close()
        self._backlog.clear()
        for number, job_id in self._jobs.items():
            if number not in self._keyed and number not in self._outliving:
                self._hub.cancel(job_id, CLIENT_LEFT)
        for task in self._keyed.values():
            task.cancel()

    # What the client says.

    def _call(self, ask: CallRequest) -> None:
        if ask.number in self._sizes:
            raise InvalidRequest(f"call {ask.number} has not ended: number each anew")
        if len(self._sizes) >= OPEN_MAX or self._size >= OPEN_SIZE_MAX:
            # Refused, and not left unread: what is cancelled comes by the same way.
            raise QueueFull(TOO_MANY_CALLS)
        alike = _route_key(ask)
        way = self._routes.get(alike) or self._new_route(ask, alike)
        self._access.count_call()
        size = len(ask.args) + len(ask.kwargs)
        self._sizes[ask.number] = size
        self._size += size
        if ask.options.key and not ask.options.fresh:
            keyed = self._start_task(self._run_keyed(ask, way))
            self._keyed[ask.number] = keyed
        elif ask.options.kept or self._price:
            # What costs something has a receipt, and so is a job that is kept.
            self._backlog.add(ask.number, partial(self._submit, ask, way))
        else:
            call = StreamedCall(ask.number, ask.args, ask.kwargs)
            self._board.submit(way, call, ask.options.blobs)

    def _new_route(self, ask: CallRequest, alike: RouteKey) -> CallRoute:
        options = ask.options
        try:
            needs = frozenset(Feature(each) for each in options.needs)
        except ValueError as error:
            raise InvalidRequest(f"needs: {error}", "needs") from error
        if options.priority not in PRIORITIES:
            expected = ", ".join(PRIORITIES)
            text = f"priority: expected one of {expected}, got {options.priority!r}"
            raise InvalidRequest(text, "priority")
        lane = CallStream(ask.name, options.timeout, needs)
        way = CallRoute(
            lane, PRIORITIES[options.priority], options.queue or CALL_QUEUE_SECONDS
        )
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[alike] = way
        return way

    def _cancel(self, number: int) -> None:
        if (job_id := self._jobs.get(number)) is not None:
            self._hub.cancel(job_id, CANCELLED_BY_OWNER)  # and what follows is told
            return
        recalled = self._backlog.remove(number)
        if (keyed := self._keyed.pop(number, None)) is not None:
            recalled = keyed.cancel()
        if recalled or self._board.cancel(number):
            self.on_failure(number, Cancelled(CANCELLED_BY_OWNER))

    # Calls that are kept.

    def _submit(self, ask: CallRequest, way: CallRoute) -> None:
        try:
            job = self._job(ask, way)
            progress = ask.options.progress
            self._hub.submit(job, DurableCall(self, ask.number, progress=progress))
        except ShoalError as error:
            self.on_failure(ask.number, error)
            return
        self._jobs[ask.number] = job.id
        if job.idempotency_key:
            self._outliving.add(ask.number)

    def _job(self, ask: CallRequest, way: CallRoute) -> Job:
        options, lane = ask.options, way.stream
        if lacking := self._hub.blobs.missing(options.blobs):
            raise NotFound(" ".join(digest.hex() for digest in lacking))
        return Job(
            self._hub.new_id(),
            Call(
                ask.name, ask.args, ask.kwargs, lane.timeout, lane.needs, options.blobs
            ),
            call_limits(lane.timeout, way.queue),
            self._access.name,
            way.priority,
            idempotency_key=options.key,
            terms=self._terms,
        )

    async def _run_keyed(self, ask: CallRequest, way: CallRoute) -> None:
        """Have a call made that goes on without its client, or was made already."""
        number = ask.number
        try:
            job = self._job(ask, way)
            # What is known already takes no place, and so waits for none.
            async with self._lookups:
                known = await self._hub.is_duplicate(job)
            answered = known and await self._submit_keyed(number, job)
            refused = False
            while not answered:
                place = await self._backlog.reserve(number, again=refused)
                try:
                    answered = await self._submit_keyed(number, job, place)
                    refused = not answered
                    place.release(refused=refused)
                finally:
                    place.release()
        except ShoalError as error:
            self.on_failure(number, error)
        finally:
            self._keyed.pop(number, None)

    async def _submit_keyed(
        self, number: int, job: Job, place: QueueReservation | None = None
    ) -> bool:
        """Tell the client what comes of a job; False: there is no room for it now.

        ``place`` is released once the job is accepted.
        """
        accepted = False
        try:
            async with self._access.submit(job) as reader:
                accepted = True
                if place is not None:
                    place.release()
                self._jobs[number] = reader.job_id
                self.send((ACCEPTED, number, reader.job_id))
                outcome = await reader.outcome()
                meta = _meta(reader.job_id, reader.worker_id, reader.attempts)
                self._send_outcome(number, outcome, meta)
        except QueueFull:
            if accepted:
                raise
        return accepted

    # What the client is told.

    def send(self, item: ReplyItem) -> None:
        self._queue.put(item)

    def job_ended(self, number: int, job: EndedJob) -> None:
        meta = _meta(job.job_id, job.worker_id, job.lease)
        match job.end:
            case Outcome() as outcome:
                self._send_outcome(number, outcome, meta)
            case ShoalError() as error:
                self.send(failure_item(number, error, meta))
                self._forget(number)
            case None:
                raise AssertionError("it has ended")
        self._count(True, 1)

    def on_results(self, returns: Iterable[CallResult]) -> None:
        count = 0
        for each in returns:
            count += 1
            if len(each.value) > INLINE_MAX:
                self._start_task(self._send_as_blob(each.number, each.value, {}))
            else:
                self.send(return_item(each))
            self._forget(each.number)
        self._count(False, count)

    def on_failure(self, number: int, error: ShoalError) -> None:
        self.send(failure_item(number, error, NOTHING))
        self._forget(number)

    def _send_outcome(
        self, number: int, outcome: Outcome, meta: dict[str, object]
    ) -> None:
        value = outcome.value
        if not value and outcome.blobs:  # a stored one, that stands apart
            meta["value"] = outcome.blobs[0].hex()
        if len(value) > INLINE_MAX:
            self._start_task(self._send_as_blob(number, value, meta))
        else:
            self.send((DONE, number, value, meta))
        self._forget(number)

    async def _send_as_blob(
        self, number: int, value: bytes, meta: dict[str, object]
    ) -> None:
        """Tell the client where a value is that is too large to be said."""
        try:
            digest = await self._hub.blobs.keep(value)
        except ShoalError as error:
            self.send(failure_item(number, error, meta))
        else:
            self.send((DONE, number, b"", {**meta, "value": digest.hex()}))

    def _forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        self._outliving.discard(number)
        self._size -= self._sizes.pop(number, 0)


def _route_key(ask: CallRequest) -> RouteKey:
    """Return what calls have in common that go the same way."""
    options = ask.options
    return ask.name, options.timeout, options.needs, options.priority, options.queue


def _meta(job_id: JobId, worker: str | None, attempts: int) -> dict[str, object]:
    return {"job": job_id, "worker": worker, "attempts": attempts}
