"""A client's calls that are not stored: which of them waits, and which lane has it."""

from collections.abc import Iterable
from typing import Protocol

from shoal.domain.errors import ShoalError
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.domain.work import CALLS, TASKS
from shoal.runtime.call_group import Group, Way
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.hub import Hub
from shoal.runtime.lane_load import Pending

LOOK_EVERY = 0.05  # seconds between looks at lanes that are idle, stuck or too long


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
        self._closed = False

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
        """Make no more calls: whoever made them has gone.

        Lanes that cannot be stopped are looked after until their calls are over.
        """
        self._closed = True
        self.pending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for group in self._groups.values():
            group.close()
        self.tidy()
        self.look_later()

    # For the groups.

    def tidy(self) -> None:
        """Forget what is over after the end: whoever made the calls is forgotten so."""
        if not self._closed:
            return
        for way, group in list(self._groups.items()):
            if group.empty:
                del self._groups[way]
        if self._timer is not None and not self._groups:
            self._timer.cancel()
            self._timer = None

    def returned(self, returns: list[LaneReturn]) -> None:
        """Tell what came of calls."""
        self.caller.returned(returns)

    def look_later(self) -> None:
        """Look at the lanes in a moment."""
        if self._timer is None and self._groups:
            due = self.clock.now() + LOOK_EVERY
            if self._closed:  # they are only to be given up, if nothing returns
                due = max(due, min(group.due for group in self._groups.values()))
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
