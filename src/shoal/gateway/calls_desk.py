"""One client's calls: each is made a job, or put on the board, and told of."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    QueueFull,
    ShoalError,
)
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.domain.work import Call, Feature, Job, Lane, Policy, Terms
from shoal.gateway.access import Caller
from shoal.gateway.asking import TIERS
from shoal.gateway.call_items import (
    ACCEPTED,
    DONE,
    Ask,
    Item,
    Recall,
    Told,
    Wrong,
    failed,
    returned,
)
from shoal.gateway.kept_call import KeptCall
from shoal.gateway.parts import Gateway
from shoal.gateway.unread import Unread
from shoal.runtime.asker import Ended
from shoal.runtime.backlog import Backlog, Reservation
from shoal.runtime.board import Board
from shoal.runtime.call_group import Way
from shoal.runtime.call_limits import QUEUE, call_limits

OPEN_MAX = 1 << 16  # calls of one client that are being made, or wait here
OPEN_SIZE_MAX = 64 << 20  # bytes of their arguments; one more is always taken
WAYS_MAX = 1024  # kinds of calls of one client that are remembered
LOOKUPS_MAX = 64  # in the store at a time: what is to be written waits behind them
INLINE_MAX = 1 << 20  # bytes from which on a value is fetched, and not said

Begin: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
Count: TypeAlias = Callable[[bool, int], None]
"""Takes whether calls were kept, and how many have ended."""

Alike: TypeAlias = tuple[str, float | None, tuple[str, ...], str, float | None]
NOTHING: Mapping[str, object] = {}
LEFT = "the client left"
CROWDED = (
    f"{OPEN_MAX} calls of this connection are open, or {OPEN_SIZE_MAX >> 20} MiB of "
    "their arguments: call again when some have ended"
)
BY_OWNER = "cancelled by its owner"


class Desk:
    """The calls of one connection, by the numbers that the client gave them.

    Args:
        begin: starts a task that ends with the connection.
        unread: what the client is to be told.
        count: is told of calls that have ended.
    """

    def __init__(
        self,
        gateway: Gateway,
        caller: Caller,
        begin: Begin,
        unread: Unread,
        count: Count,
    ) -> None:
        self._gateway = gateway
        self._hub = gateway.hub
        self._caller = caller
        self._begin = begin
        self._unread = unread
        self._count = count
        self._board = Board(gateway.hub, gateway.clock, caller.name, self)
        self._price = gateway.prices.price(Policy.FAST, Call("", b"", b"").kind)
        self._terms = Terms(price=self._price)
        self._ways: dict[Alike, Way] = {}
        self._sizes: dict[int, int] = {}  # of all open calls, in bytes
        self._size = 0
        self._backlog = Backlog(gateway.hub, caller.name)  # to be kept
        self._jobs: dict[int, JobId] = {}  # of those that are
        self._keyed: dict[int, asyncio.Task[None]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self._lasting: set[int] = set()  # those that go on without their client

    def take(self, items: Sequence[Item | Wrong]) -> None:
        """Take what the client says in one message.

        Raises KeyRevoked if it may say nothing more.
        """
        self._gateway.access.check(self._caller)
        for item in items:
            match item:
                case Ask():
                    try:
                        self._ask(item)
                    except ShoalError as error:
                        self.tell(failed(item.number, error, NOTHING))
                case Recall(number):
                    self._recall(number)
                case Wrong(number, wrong):
                    self.tell(failed(number, wrong, NOTHING))
        self._board.flush()
        self._backlog.flush()

    def close(self) -> None:
        """Make no more calls but those that are to go on: the client has left."""
        self._unread.close()
        self._board.close()
        self._backlog.clear()
        for number, job_id in self._jobs.items():
            if number not in self._keyed and number not in self._lasting:
                self._hub.withdraw(job_id, LEFT)
        for task in self._keyed.values():
            task.cancel()

    # What the client says.

    def _ask(self, ask: Ask) -> None:
        if ask.number in self._sizes:
            raise InvalidRequest(f"call {ask.number} has not ended: number each anew")
        if len(self._sizes) >= OPEN_MAX or self._size >= OPEN_SIZE_MAX:
            # Refused, and not left unread: what is cancelled comes by the same way.
            raise QueueFull(CROWDED)
        alike = _alike(ask)
        way = self._ways.get(alike) or self._new_way(ask, alike)
        self._gateway.access.count_call(self._caller)
        size = len(ask.args) + len(ask.kwargs)
        self._sizes[ask.number] = size
        self._size += size
        if ask.options.key and not ask.options.fresh:
            keyed = self._begin(self._do_keyed(ask, way))
            self._keyed[ask.number] = keyed
        elif ask.options.kept or self._price:
            # What costs something has a receipt, and so is a job that is kept.
            self._backlog.add(ask.number, partial(self._place, ask, way))
        else:
            call = LaneCall(ask.number, ask.args, ask.kwargs)
            self._board.ask(way, call, ask.options.blobs)

    def _new_way(self, ask: Ask, alike: Alike) -> Way:
        options = ask.options
        try:
            needs = frozenset(Feature(each) for each in options.needs)
        except ValueError as error:
            raise InvalidRequest(f"needs: {error}", "needs") from error
        if options.priority not in TIERS:
            expected = ", ".join(TIERS)
            text = f"priority: expected one of {expected}, got {options.priority!r}"
            raise InvalidRequest(text, "priority")
        lane = Lane(ask.name, options.timeout, needs)
        way = Way(lane, TIERS[options.priority], options.queue or QUEUE)
        if len(self._ways) >= WAYS_MAX:
            self._ways.clear()
        self._ways[alike] = way
        return way

    def _recall(self, number: int) -> None:
        if (job_id := self._jobs.get(number)) is not None:
            self._hub.withdraw(job_id, BY_OWNER)  # and what follows is told
            return
        recalled = self._backlog.remove(number)
        if (keyed := self._keyed.pop(number, None)) is not None:
            recalled = keyed.cancel()
        if recalled or self._board.recall(number):
            self.failed(number, Cancelled(BY_OWNER))

    # Calls that are kept.

    def _place(self, ask: Ask, way: Way) -> None:
        try:
            job = self._job(ask, way)
            progress = ask.options.progress
            self._hub.place(job, KeptCall(self, ask.number, progress=progress))
        except ShoalError as error:
            self.failed(ask.number, error)
            return
        self._jobs[ask.number] = job.id
        if job.idempotency_key:
            self._lasting.add(ask.number)

    def _job(self, ask: Ask, way: Way) -> Job:
        options, lane = ask.options, way.lane
        if lacking := self._hub.blobs.lacking(options.blobs):
            raise NotFound(" ".join(digest.hex() for digest in lacking))
        return Job(
            self._hub.new_id(),
            Call(
                ask.name, ask.args, ask.kwargs, lane.timeout, lane.needs, options.blobs
            ),
            call_limits(lane.timeout, way.queue),
            self._caller.name,
            way.priority,
            idempotency_key=options.key,
            terms=self._terms,
        )

    async def _do_keyed(self, ask: Ask, way: Way) -> None:
        """Have a call made that goes on without its client, or was made already."""
        number = ask.number
        try:
            job = self._job(ask, way)
            # What is known already takes no place, and so waits for none.
            async with self._lookups:
                known = await self._hub.known(job)
            answered = known and await self._answered(number, job)
            refused = False
            while not answered:
                place = await self._backlog.reserve(number, again=refused)
                try:
                    answered = await self._answered(number, job, place)
                    refused = not answered
                    place.release(refused=refused)
                finally:
                    place.release()
        except ShoalError as error:
            self.failed(number, error)
        finally:
            self._keyed.pop(number, None)

    async def _answered(
        self, number: int, job: Job, place: Reservation | None = None
    ) -> bool:
        """Tell the client what comes of a job; False: there is no room for it now.

        ``place`` is released once the job is accepted.
        """
        accepted = False
        try:
            async with self._gateway.access.answering(job, self._caller) as reader:
                accepted = True
                if place is not None:
                    place.release()
                self._jobs[number] = reader.job_id
                self.tell((ACCEPTED, number, reader.job_id))
                outcome = await reader.outcome()
                meta = _meta(reader.job_id, reader.worker_id, reader.attempts)
                self._done(number, outcome, meta)
        except QueueFull:
            if accepted:
                raise
        return accepted

    # What the client is told.

    def tell(self, item: Told) -> None:
        self._unread.tell(item)

    def ended(self, number: int, job: Ended) -> None:
        meta = _meta(job.job_id, job.worker_id, job.lease)
        match job.end:
            case Outcome() as outcome:
                self._done(number, outcome, meta)
            case ShoalError() as error:
                self.tell(failed(number, error, meta))
                self._forget(number)
            case None:
                raise AssertionError("it has ended")
        self._count(True, 1)

    def returned(self, returns: Iterable[LaneReturn]) -> None:
        count = 0
        for each in returns:
            count += 1
            if len(each.value) > INLINE_MAX:
                self._begin(self._tell_apart(each.number, each.value, {}))
            else:
                self.tell(returned(each))
            self._forget(each.number)
        self._count(False, count)

    def failed(self, number: int, error: ShoalError) -> None:
        self.tell(failed(number, error, NOTHING))
        self._forget(number)

    def _done(self, number: int, outcome: Outcome, meta: dict[str, object]) -> None:
        value = outcome.value
        if not value and outcome.blobs:  # a stored one, that stands apart
            meta["value"] = outcome.blobs[0].hex()
        if len(value) > INLINE_MAX:
            self._begin(self._tell_apart(number, value, meta))
        else:
            self.tell((DONE, number, value, meta))
        self._forget(number)

    async def _tell_apart(
        self, number: int, value: bytes, meta: dict[str, object]
    ) -> None:
        """Tell the client where a value is that is too large to be said."""
        try:
            digest = await self._hub.blobs.keep(value)
        except ShoalError as error:
            self.tell(failed(number, error, meta))
        else:
            self.tell((DONE, number, b"", {**meta, "value": digest.hex()}))

    def _forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        self._lasting.discard(number)
        self._size -= self._sizes.pop(number, 0)


def _alike(ask: Ask) -> Alike:
    """Return what calls have in common that go the same way."""
    options = ask.options
    return ask.name, options.timeout, options.needs, options.priority, options.queue


def _meta(job_id: JobId, worker: str | None, attempts: int) -> dict[str, object]:
    return {"job": job_id, "worker": worker, "attempts": attempts}
