"""A client's calls that are not stored: which of them waits, and which lane has it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.errors import (
    NotFound,
    QueueFull,
    ShoalError,
    TimedOut,
    WorkerLost,
)
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.domain.work import CALLS, TASKS, Lane, Priority
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.hub import Hub
from shoal.runtime.lane_load import LaneLoad, Pending
from shoal.runtime.lanes import OpenLane

ATTEMPTS_MAX = 3  # lanes that are lost with a call, until it is to blame
LOOK_EVERY = 0.05  # seconds between looks at lanes that are idle, stuck or too long
IDLE_MAX = 2.0  # seconds that a lane is held for calls that may come
IDLE_WANTED = 0.25  # the same, while jobs wait that its slot may be for
TURN = 1.0  # seconds that a lane keeps its slot from others that wait


@dataclass(frozen=True, slots=True)
class Way:
    """What calls have in common that may go through one lane."""

    lane: Lane
    priority: Priority
    queue: float  # seconds that they may wait for a worker


class Caller(Protocol):
    """Whoever made the calls."""

    def returned(self, returns: Iterable[LaneReturn]) -> None:
        """Take what came of calls, each once."""
        ...

    def failed(self, number: int, error: ShoalError) -> None:
        """Take note that nothing comes of a call."""
        ...


class Board:
    """The calls of one connection, by their numbers.

    Nothing here waits: calls go out with what the client has sent at once, and the rest
    as others return.
    """

    def __init__(self, hub: Hub, clock: Clock, owner: str, caller: Caller) -> None:
        self.hub = hub
        self.clock = clock
        self.owner = owner
        self.caller = caller
        self.pending: dict[int, tuple[Pending, Group]] = {}
        self._groups: dict[Way, Group] = {}
        self._timer: Timer | None = None

    def ask(self, way: Way, call: LaneCall, blobs: tuple[bytes, ...] = ()) -> None:
        """Have a call made, once ``flush`` is called."""
        group = self._groups.get(way)
        if group is None:
            group = self._groups[way] = Group(self, way)
        pending = Pending(call, blobs)
        self.pending[call.number] = (pending, group)
        group.waiting.append(pending)

    def flush(self) -> None:
        """Give to lanes what can be given, and open more of them."""
        for group in list(self._groups.values()):
            if group.waiting:
                group.flush()
        self.look_later()

    def recall(self, number: int) -> bool:
        """Have a call not made, or stopped; say whether there was one."""
        known = self.pending.pop(number, None)
        if known is None:
            return False
        pending, group = known
        group.recall(pending)
        return True

    def close(self) -> None:
        """Make no more calls: whoever made them has gone."""
        self.pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    # For the groups.

    def look_later(self) -> None:
        """Look at the lanes in a moment."""
        if self._timer is None and self._groups:
            due = self.clock.now() + LOOK_EVERY
            self._timer = self.clock.call_at(due, self._look)

    def fail(self, calls: Iterable[Pending], error: ShoalError) -> None:
        """Give calls up."""
        for each in calls:
            if self.pending.pop(each.call.number, None) is not None:
                self.caller.failed(each.call.number, error)

    def _look(self) -> None:
        self._timer = None
        queues = self.hub.pool.queues
        waiting = sum(len(queues.get(each, ())) for each in (CALLS, TASKS))
        for way, group in list(self._groups.items()):
            waiting -= group.look(waiting)
            if group.empty:
                del self._groups[way]
        self.look_later()


class Group:
    """Calls that may go through the same lanes, and those lanes."""

    def __init__(self, board: Board, way: Way) -> None:
        self.waiting: deque[Pending] = deque()
        self.opening: OpenLane | None = None  # that no worker has yet
        self._board = board
        self._way = way
        self._loads: dict[OpenLane, LaneLoad] = {}

    @property
    def empty(self) -> bool:
        """Whether there is nothing left of it."""
        return not (self.waiting or self._loads or self.opening)

    def flush(self) -> None:
        """Share out the calls that wait among the lanes; ask for one more for the rest.

        Those with the least to do come first.
        """
        free = [load for load in self._loads.values() if load.room > 0]
        free.sort(key=lambda load: len(load.given))
        for index, load in enumerate(free):
            share = -(-len(self.waiting) // (len(free) - index))
            self._give(load, min(load.room, share))
        if self.waiting and self.opening is None:
            self._open()

    def look(self, waiting: int) -> int:
        """See to lanes that are idle, stuck, or keep a slot from others for too long.

        ``waiting`` is how many jobs wait in the pool that may want such a slot.
        Returns for how many of them one is given back.
        """
        now = self._board.clock.now()
        others = max(0, waiting - (self.opening is not None))
        closing = 0
        idle_max = IDLE_WANTED if others else IDLE_MAX
        for lane, load in list(self._loads.items()):
            if behind := load.stuck(now):
                self.waiting.extendleft(reversed(behind))
            turn_over = now - load.opened_at >= TURN
            if closing < others and turn_over and not load.closing:
                load.closing = True
                closing += 1
            idle = not load.given and now - load.active_at >= idle_max
            if (idle and not self.waiting) or (load.closing and not load.given):
                del self._loads[lane]
                lane.close(idle=True)
        if self.waiting:
            self.flush()
        return closing

    def recall(self, pending: Pending) -> None:
        """Take a call back, wherever it is."""
        for load in self._loads.values():
            if load.lane.job_id == pending.lane:
                if load.lane.stops:
                    del load.given[pending.call.number]
                    load.lane.recall([pending.call.number])
                return
        self.waiting.remove(pending)

    def close(self) -> None:
        """Give all slots back; what cannot be stopped is waited for."""
        self.waiting.clear()
        if self.opening is not None:
            self.opening.close(idle=False)
        for lane, load in list(self._loads.items()):
            load.closing = True
            if not load.given or lane.stops:
                del self._loads[lane]
                lane.close(idle=not load.given)

    # The lanes' side.

    def opened(self, lane: OpenLane) -> None:
        now = self._board.clock.now()
        if (load := self._loads.get(lane)) is not None:
            load.give_again(now)
            return
        self.opening = None
        self._loads[lane] = LaneLoad(lane, now, active_at=now)
        self.flush()
        self._board.look_later()

    def returned(self, lane: OpenLane, returns: list[LaneReturn]) -> None:
        load = self._loads.get(lane)
        if load is None:
            return
        given, pending = load.given, self._board.pending
        told = []
        for each in returns:
            if given.pop(each.number, None) is None:
                continue  # it was taken back, and has been given to another
            if pending.pop(each.number, None) is not None:
                told.append(each)
        load.measure(len(returns), self._board.clock.now())
        if told:
            self._board.caller.returned(told)
        if load.closing and not given:
            del self._loads[lane]
            lane.close(idle=True)
        if self.waiting:
            self.flush()

    def over(self, lane: OpenLane, error: ShoalError) -> None:
        load = self._loads.pop(lane, None)
        if load is None:
            self.opening = None
            if isinstance(error, QueueFull):
                self._board.hub.when_room(self.flush)
            elif not self._loads:
                self._fail_waiting(error)
            return
        calls: list[Pending] = load.lost()
        if not isinstance(error, WorkerLost | TimedOut):
            self._board.fail(calls, error)
            calls = []
        tried = [each for each in calls if each.attempts >= ATTEMPTS_MAX]
        blamed = f"lost {ATTEMPTS_MAX} workers while they ran it, the last one: {error}"
        self._board.fail(tried, WorkerLost(blamed))
        again = [each for each in calls if each.attempts < ATTEMPTS_MAX]
        self.waiting.extendleft(reversed(again))
        self.flush()

    def _give(self, load: LaneLoad, most: int) -> None:
        calls: list[Pending] = []
        blobs = self._board.hub.blobs
        while self.waiting and len(calls) < most:
            each = self.waiting.popleft()
            if each.blobs and (lacking := blobs.lacking(each.blobs)):
                names = " ".join(digest.hex() for digest in lacking)
                self._board.fail([each], NotFound(names))
                continue
            calls.append(each)
        if calls:
            load.give(calls, self._board.clock.now())

    def _open(self) -> None:
        hub = self._board.hub
        if len(self._loads) >= max(1, hub.pool.roster.slots[CALLS]):
            return
        way = self._way
        try:
            self.opening = OpenLane(
                hub, self._board.owner, way.lane, way.priority, way.queue, self
            )
        except ShoalError as error:
            if not self._loads:
                self._fail_waiting(error)

    def _fail_waiting(self, error: ShoalError) -> None:
        waiting, self.waiting = self.waiting, deque()
        self._board.fail(waiting, error)
