"""Calls that may go through the same lanes, and those lanes."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.errors import (
    NoFirstOutput,
    NotFound,
    QueueFull,
    ShoalError,
    TimedOut,
    WorkerLost,
)
from shoal.domain.vocabulary import LaneReturn
from shoal.domain.work import CALLS, Lane, Priority
from shoal.runtime.call_limits import call_limits
from shoal.runtime.clock import Clock
from shoal.runtime.hub import Hub
from shoal.runtime.lane_load import LaneLoad, Pending
from shoal.runtime.lanes import OpenLane

ATTEMPTS_MAX = 3  # lanes that are lost with a call, until it is to blame
IDLE_MAX = 2.0  # seconds that a lane is held for calls that may come
IDLE_WANTED = 0.25  # the same, while jobs wait that its slot may be for
TURN = 1.0  # seconds that a lane keeps its slot from others that wait


@dataclass(frozen=True, slots=True)
class Way:
    """What calls have in common that may go through one lane."""

    lane: Lane
    priority: Priority
    queue: float  # seconds that they may wait for a worker


class Place(Protocol):
    """Where groups have their calls from; ``pending`` are those that are wanted."""

    hub: Hub
    clock: Clock
    owner: str
    pending: "dict[int, tuple[Pending, Group]]"

    def look_later(self) -> None:
        """Look at the lanes in a moment."""
        ...

    def returned(self, returns: list[LaneReturn]) -> None:
        """Take what came of calls that are wanted."""
        ...

    def fail(self, calls: Iterable[Pending], error: ShoalError) -> None:
        """Give calls up."""
        ...

    def tidy(self) -> None:
        """Take note that a group may have nothing left."""
        ...


class Group:
    """The calls of one way, and the lanes that they go through."""

    def __init__(self, place: Place, way: Way) -> None:
        self.waiting: deque[Pending] = deque()
        self.opening: OpenLane | None = None  # that no worker has yet
        self._place = place
        self._way = way
        self._patience = call_limits(way.lane.timeout).first_output
        self._loads: dict[OpenLane, LaneLoad] = {}
        self._listening = False  # whether the hub tells of room

    @property
    def due(self) -> float:
        """When the first of its calls is waited for no more."""
        return min((load.due for load in self._loads.values()), default=0.0)

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
        """See to lanes that are idle, stuck, late, or keep a slot for too long.

        ``waiting`` is how many jobs wait in the pool that may want such a slot.
        Returns for how many of them one is given back.
        """
        now = self._place.clock.now()
        others = max(0, waiting - (self.opening is not None))
        closing = 0
        idle_max = IDLE_WANTED if others else IDLE_MAX
        for lane, load in list(self._loads.items()):
            if load.due <= now:
                self._give_up(lane)
                continue
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
            self.opening = None
        for lane, load in list(self._loads.items()):
            load.closing = True
            if not load.given or lane.stops:
                del self._loads[lane]
                lane.close(idle=not load.given)

    # The lanes' side.

    def opened(self, lane: OpenLane) -> None:
        now = self._place.clock.now()
        if (load := self._loads.get(lane)) is not None:
            load.give_again(now)
            return
        self.opening = None
        self._loads[lane] = LaneLoad(lane, now, self._patience, active_at=now)
        self.flush()
        self._place.look_later()

    def returned(self, lane: OpenLane, returns: list[LaneReturn]) -> None:
        load = self._loads.get(lane)
        if load is None:
            return
        given, pending = load.given, self._place.pending
        told = []
        for each in returns:
            if given.pop(each.number, None) is None:
                continue  # it was taken back, and has been given to another
            if pending.pop(each.number, None) is not None:
                told.append(each)
        load.measure(len(returns), self._place.clock.now())
        if told:
            self._place.returned(told)
        if load.closing and not given:
            del self._loads[lane]
            lane.close(idle=True)
            self._place.tidy()
        if self.waiting:
            self.flush()

    def over(self, lane: OpenLane, error: ShoalError) -> None:
        load = self._loads.pop(lane, None)
        if load is None:
            self.opening = None
            if isinstance(error, QueueFull):
                self._wait_for_room()
            elif not self._loads:
                self._fail_waiting(error)
            return
        calls: list[Pending] = load.lost()
        if not isinstance(error, WorkerLost | TimedOut):
            self._place.fail(calls, error)
            calls = []
        self._wait_again(calls, str(error))
        self.flush()
        self._place.tidy()

    def _wait_for_room(self) -> None:
        if not self._listening:
            self._listening = True
            self._place.hub.when_room(self._on_room)

    def _on_room(self) -> None:
        self._listening = False
        if self.waiting:
            self.flush()

    def _give_up(self, lane: OpenLane) -> None:
        """Wait no more for a call that its worker says nothing of, nor for the lane.

        A worker that cannot stop has one slot fewer then, until it says something.
        """
        load = self._loads.pop(lane)
        late, *others = load.lost()
        seconds = f"{self._patience:g} s"
        self._place.fail([late], NoFirstOutput(f"its worker said nothing in {seconds}"))
        self._wait_again(others, f"nothing was said of a call for {seconds}")
        lane.close(idle=False)

    def _wait_again(self, calls: list[Pending], reason: str) -> None:
        """Have calls wait that were lost with a lane, if somebody still wants them."""
        pending = self._place.pending
        known = [(pending.get(each.call.number), each) for each in calls]
        wanted = [each for at, each in known if at is not None and at[0] is each]
        blamed = f"lost {ATTEMPTS_MAX} workers while they ran it, the last one: "
        tried = [each for each in wanted if each.attempts >= ATTEMPTS_MAX]
        self._place.fail(tried, WorkerLost(blamed + reason))
        again = [each for each in wanted if each.attempts < ATTEMPTS_MAX]
        self.waiting.extendleft(reversed(again))

    def _give(self, load: LaneLoad, most: int) -> None:
        calls: list[Pending] = []
        blobs = self._place.hub.blobs
        while self.waiting and len(calls) < most:
            each = self.waiting.popleft()
            if each.blobs and (lacking := blobs.lacking(each.blobs)):
                names = " ".join(digest.hex() for digest in lacking)
                self._place.fail([each], NotFound(names))
                continue
            calls.append(each)
        if calls:
            load.give(calls, self._place.clock.now())

    def _open(self) -> None:
        hub = self._place.hub
        if len(self._loads) >= max(1, hub.pool.roster.slots[CALLS]):
            return
        if hub.room(self._place.owner) <= 0:
            # Of all groups that wait, only as many ask as there are places.
            self._wait_for_room()
            return
        way = self._way
        try:
            self.opening = OpenLane(
                hub, self._place.owner, way.lane, way.priority, way.queue, self
            )
        except ShoalError as error:
            if not self._loads:
                self._fail_waiting(error)

    def _fail_waiting(self, error: ShoalError) -> None:
        waiting, self.waiting = self.waiting, deque()
        self._place.fail(waiting, error)
