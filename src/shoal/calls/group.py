"""The calls of one route, and the streams that they share."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.calls.stream import OpenCallStream, PendingCall, StreamLoad
from shoal.domain import errors
from shoal.domain.job import Priority
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import CALL_QUEUE, CallStream
from shoal.pool.eligibility import no_worker_reason
from shoal.pool.functions import call_limits, no_call_result

if TYPE_CHECKING:
    from shoal.calls.scheduler import CallScheduler

ATTEMPTS_MAX = 2  # streams lost while running a call, until the call is blamed
IDLE_MAX = 2.0  # seconds to hold an idle stream
IDLE_WANTED = 0.25  # the same, while jobs wait that could use its slot
STUCK = "the call before it takes long"
LOST = "the worker was lost, and did not come back"
SLOT_TURN = 1.0  # seconds that a stream keeps its slot while others wait


@dataclass(frozen=True, slots=True)
class CallRoute:
    """The properties that calls of one stream share."""

    stream: CallStream
    priority: Priority
    queue: float  # seconds to wait for a worker
    waits: bool = False  # as ``JobTerms.waits``


class CallGroup:
    """The calls of one route, and the streams that carry them."""

    def __init__(self, owner: "CallScheduler", route: CallRoute) -> None:
        self.waiting: deque[PendingCall] = deque()
        self.opening: OpenCallStream | None = None  # not yet assigned to a worker
        self._owner = owner
        self._route = route
        self._call_timeout = call_limits(route.stream.timeout).first_output
        self._loads: dict[OpenCallStream, StreamLoad] = {}
        self._listening = False  # whether it waits for queue room
        self._paused = False  # whether no more calls are sent

    @property
    def due(self) -> float:
        """When the first of its calls times out."""
        return min((load.due for load in self._loads.values()), default=0.0)

    @property
    def is_empty(self) -> bool:
        """Whether it has neither calls nor streams."""
        return not (self.waiting or self._loads or self.opening)

    def flush(self) -> None:
        """Distribute waiting calls over the streams; open another for the rest.

        The least loaded streams come first.
        """
        if self._paused or self._owner.held:
            return
        free = [load for load in self._loads.values() if load.capacity > 0]
        free.sort(key=lambda load: len(load.in_flight))
        for index, load in enumerate(free):
            share = -(-len(self.waiting) // (len(free) - index))
            self._push(load, min(load.capacity, share))
        if self.waiting and self.opening is None:
            self._open()

    def check(self, waiting: int) -> int:
        """Check for streams that are idle, stuck, late, or hold a slot for too long.

        ``waiting`` is the number of jobs in the pool that could use such a slot.
        Returns the number of released slots.
        """
        now = self._owner.clock.now()
        other_calls = max(0, waiting - (self.opening is not None))
        closing = 0
        idle_max = IDLE_WANTED if other_calls else IDLE_MAX
        for stream, load in list(self._loads.items()):
            if load.due <= now:
                self._give_up(stream)
                continue
            if behind := load.take_back_stuck(now):
                self.waiting.extendleft(reversed(behind))
                numbers = [each.call.number for each in behind]
                self._owner.listener.on_requeued(numbers, STUCK, lost=False)
            if not stream.may_continue:
                load.closing = True
            turn_over = now - load.opened_at >= SLOT_TURN
            if closing < other_calls and turn_over and not load.closing:
                load.closing = True
                closing += 1
            idle = not load.in_flight and now - load.active_at >= idle_max
            if (idle and not self.waiting) or (load.closing and not load.in_flight):
                del self._loads[stream]
                stream.close(idle=True)
        if self.waiting:
            self._expire(now)
            self.flush()
        return closing

    def cancel(self, pending: PendingCall) -> None:
        """Cancel a call, waiting or in flight."""
        for load in self._loads.values():
            if load.stream.job_id == pending.stream_id:
                if load.stream.can_cancel:
                    del load.in_flight[pending.call.number]
                    load.stream.cancel_calls([pending.call.number])
                return
        self.waiting.remove(pending)

    def close(self) -> None:
        """Give all slots back; streams that cannot cancel finish their calls first."""
        self.waiting.clear()
        self._release_slots(cancel=True)

    def pause(self) -> None:
        """Give each slot back when its last call has ended; send no more."""
        self._paused = True
        self._release_slots(cancel=False)

    def runs(self, stream: OpenCallStream, number: int) -> bool:
        """Return whether a call is with the stream's worker."""
        load = self._loads.get(stream)
        return load is not None and number in load.in_flight

    # Events of the streams.

    def on_open(self, stream: OpenCallStream) -> None:
        """Handle the lease of the stream to a worker: calls may be pushed."""
        now = self._owner.clock.now()
        if (load := self._loads.get(stream)) is not None:
            self._move(stream, load, now)
            return
        self.opening = None
        self._loads[stream] = StreamLoad(stream, now, self._call_timeout, active_at=now)
        self.flush()
        self._owner.schedule_check()

    def on_results(self, stream: OpenCallStream, returns: list[CallResult]) -> None:
        """Receive the results of calls."""
        load = self._loads.get(stream)
        if load is None:
            return
        given, pending = load.in_flight, self._owner.pending
        wanted = []
        for each in returns:
            if given.pop(each.number, None) is None:
                continue  # it was moved to another stream
            if pending.pop(each.number, None) is not None:
                wanted.append(each)
        load.measure(len(returns), self._owner.clock.now())
        if wanted:
            self._owner.listener.on_results(wanted)
        if load.closing and not given:
            del self._loads[stream]
            stream.close(idle=True)
            self._owner.remove_finished()
        if self.waiting:
            self.flush()

    def on_end(self, stream: OpenCallStream, error: errors.ShoalError) -> None:
        """Handle the end of the stream, except by ``close``.

        Calls without a result may have run or not.
        """
        load = self._loads.pop(stream, None)
        if load is None:
            self.opening = None
            if isinstance(error, errors.QueueFull):
                self._wait_for_room()
            elif isinstance(error, errors.NoWorker):
                self._expire(self._owner.clock.now(), str(error))
                self.flush()
            elif not self._loads:
                self._fail_waiting(error)
            return
        calls: list[PendingCall] = load.take_unfinished()
        if not isinstance(error, errors.WorkerLost | errors.TimedOut):
            self._owner.fail(calls, error)
            calls = []
        self._requeue(calls, str(error))
        self.flush()
        self._owner.remove_finished()

    def _move(self, stream: OpenCallStream, load: StreamLoad, now: float) -> None:
        """Send the calls of a stream to the worker that has it now."""
        if stream.goes_on:
            load.repeat(self._wanted(load.in_flight.values()), now)
        elif stream.losses > load.losses:
            load.losses = stream.losses
            self._requeue(load.take_unfinished(), LOST)
        else:
            load.resend(self._wanted(load.in_flight.values()), now)
        if load.in_flight and not stream.goes_on:
            self._report_pushed(load, list(load.in_flight))
        elif load.closing and not load.in_flight:
            del self._loads[stream]
            stream.close(idle=True)
            self._owner.remove_finished()
        self.flush()

    def _wait_for_room(self) -> None:
        if not self._listening:
            self._listening = True
            self._owner.hub.on_queue_room(self._on_room)

    def _on_room(self) -> None:
        self._listening = False
        if self.waiting:
            self.flush()

    def _release_slots(self, *, cancel: bool) -> None:
        """Close all streams, those with calls only if they ``cancel`` them."""
        if self.opening is not None:
            self.opening.close(idle=False)
            self.opening = None
        for stream, load in list(self._loads.items()):
            load.closing = True
            if not load.in_flight or (cancel and stream.can_cancel):
                del self._loads[stream]
                stream.close(idle=not load.in_flight)

    def _give_up(self, stream: OpenCallStream) -> None:
        """Fail a call that timed out, and close its stream.

        A worker that cannot cancel has one slot fewer until it responds.
        """
        load = self._loads.pop(stream)
        late, *others = load.take_unfinished()
        error = no_call_result(self._call_timeout)
        self._owner.fail([late], errors.NoFirstOutput(error))
        self._requeue(others, error)
        stream.close(idle=False)

    def _requeue(self, calls: list[PendingCall], reason: str) -> None:
        """Requeue the calls of a lost stream, except cancelled ones."""
        wanted = self._wanted(calls)
        blamed = f"lost {ATTEMPTS_MAX} workers while they ran it, the last one: "
        tried = [each for each in wanted if each.attempts >= ATTEMPTS_MAX]
        self._owner.fail(tried, errors.WorkerLost(blamed + reason))
        again = [each for each in wanted if each.attempts < ATTEMPTS_MAX]
        wait_until = self._owner.clock.now() + self._route.queue
        for each in again:
            if each.attempts:  # the others have only waited
                each.wait_until = wait_until
        self.waiting.extendleft(reversed(again))
        if again:
            numbers = [each.call.number for each in again]
            self._owner.listener.on_requeued(numbers, reason, lost=True)

    def _wanted(self, calls: Iterable[PendingCall]) -> list[PendingCall]:
        """Return the calls that are not cancelled.

        A worker that cannot cancel runs a cancelled call to its end.
        """
        pending = self._owner.pending
        known = [(pending.get(each.call.number), each) for each in calls]
        return [each for at, each in known if at is not None and at[0] is each]

    def _push(self, load: StreamLoad, most: int) -> None:
        calls: list[PendingCall] = []
        blobs = self._owner.hub.blobs
        while self.waiting and len(calls) < most:
            alone = load.runs_alone(self.waiting[0])
            if alone and (calls or load.in_flight):
                break
            each = self.waiting.popleft()
            if each.blobs and (lacking := blobs.missing(each.blobs)):
                names = " ".join(digest.hex() for digest in lacking)
                self._owner.fail([each], errors.NotFound(names))
                continue
            calls.append(each)
            if alone:
                break
        if calls:
            load.push(calls, self._owner.clock.now())
            self._report_pushed(load, [each.call.number for each in calls])

    def _report_pushed(self, load: StreamLoad, numbers: list[int]) -> None:
        worker_id = load.stream.worker_id
        assert worker_id is not None, "an open stream has a worker"
        self._owner.listener.on_pushed(numbers, worker_id)

    def _expire(self, now: float, reason: str = "") -> None:
        """Fail the calls that have waited too long."""
        late: list[PendingCall] = []
        for each in self.waiting:
            if each.wait_until <= now:
                late.append(each)
            elif not each.attempts:
                break  # those behind it came later
        if not late:
            return
        expired = {each.call.number for each in late}
        self.waiting = deque(
            each for each in self.waiting if each.call.number not in expired
        )
        self._owner.fail(late, errors.NoWorker(reason or self._waiting_reason()))

    def _waiting_reason(self) -> str:
        pool = self._owner.hub.pool
        opening = self.opening and pool.jobs.get(self.opening.job_id)
        limit = f"queue: over the limit of {self._route.queue:g} s"
        if not opening:
            return f"every slot for {self._route.stream.name} was busy ({limit})"
        return f"{no_worker_reason(pool, opening)} ({limit})"

    def _open(self) -> None:
        hub = self._owner.hub
        # Slots of workers that take nothing new do not count, nor do their streams, nor
        # those of workers that are away.
        usable = sum(each.may_continue and not each.is_away for each in self._loads)
        if usable >= max(1, hub.pool.roster.slots[CALL_QUEUE]):
            return
        if hub.queue_room(self._owner.owner) <= 0:
            # Only as many groups open a stream as the queue has room for.
            self._wait_for_room()
            return
        route = self._route
        try:
            self.opening = OpenCallStream(
                *(hub, self._owner.owner, route.stream, route.priority, route.queue),
                self,
                waits=route.waits,
            )
        except errors.ShoalError as error:
            if not self._loads:
                self._fail_waiting(error)
            errors.release_frames(error)

    def _fail_waiting(self, error: errors.ShoalError) -> None:
        waiting, self.waiting = self.waiting, deque()
        self._owner.fail(waiting, error)
