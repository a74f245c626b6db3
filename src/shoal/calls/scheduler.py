"""One client's unstored calls: pending calls, and the streams that carry them."""

from collections.abc import Iterable
from typing import Protocol

from shoal.calls.group import CallGroup, CallRoute
from shoal.calls.stream_load import PendingCall
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShoalError
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import CALL_QUEUE, TASK_QUEUE
from shoal.transports.clock import Clock, Timer

CHECK_INTERVAL = 0.05  # seconds between looks at lanes that are idle, stuck or too long


class ResultListener(Protocol):
    """Whoever made the calls."""

    def on_results(self, returns: Iterable[CallResult]) -> None:
        """Take what came of calls, each once."""
        ...

    def on_failure(self, number: int, error: ShoalError) -> None:
        """Take note that nothing comes of a call."""
        ...


class CallScheduler:
    """The calls of one connection, by their numbers.

    Nothing here waits: calls go out with what the client has sent at once, and the rest
    as others return.
    """

    def __init__(
        self, hub: Hub, clock: Clock, owner: str, caller: ResultListener
    ) -> None:
        self.hub = hub
        self.clock = clock
        self.owner = owner
        self.listener = caller
        self.pending: dict[int, tuple[PendingCall, CallGroup]] = {}
        self._groups: dict[CallRoute, CallGroup] = {}
        self._timer: Timer | None = None
        self._closed = False

    def submit(
        self, way: CallRoute, call: StreamedCall, blobs: tuple[bytes, ...] = ()
    ) -> None:
        """Have a call made, once ``flush`` is called."""
        group = self._groups.get(way)
        if group is None:
            group = self._groups[way] = CallGroup(self, way)
        pending = PendingCall(call, blobs)
        self.pending[call.number] = (pending, group)
        group.waiting.append(pending)

    def flush(self) -> None:
        """Give to lanes what can be given, and open more of them."""
        for group in list(self._groups.values()):
            if group.waiting:
                group.flush()
        self.schedule_check()

    def cancel(self, number: int) -> bool:
        """Have a call not made, or stopped; say whether there was one."""
        known = self.pending.pop(number, None)
        if known is None:
            return False
        pending, group = known
        group.cancel(pending)
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
        self.remove_finished()
        self.schedule_check()

    # For the groups.

    def remove_finished(self) -> None:
        """Forget what is over after the end: whoever made the calls is forgotten so."""
        if not self._closed:
            return
        for way, group in list(self._groups.items()):
            if group.is_empty:
                del self._groups[way]
        if self._timer is not None and not self._groups:
            self._timer.cancel()
            self._timer = None

    def on_results(self, returns: list[CallResult]) -> None:
        """Tell what came of calls."""
        self.listener.on_results(returns)

    def schedule_check(self) -> None:
        """Look at the lanes in a moment."""
        if self._timer is None and self._groups:
            due = self.clock.now() + CHECK_INTERVAL
            if self._closed:  # they are only to be given up, if nothing returns
                due = max(due, min(group.due for group in self._groups.values()))
            self._timer = self.clock.call_at(due, self._check)

    def fail(self, calls: Iterable[PendingCall], error: ShoalError) -> None:
        """Give calls up."""
        for each in calls:
            if self.pending.pop(each.call.number, None) is not None:
                self.listener.on_failure(each.call.number, error)

    def _check(self) -> None:
        self._timer = None
        queues = self.hub.pool.queues
        waiting = sum(len(queues.get(each, ())) for each in (CALL_QUEUE, TASK_QUEUE))
        for way, group in list(self._groups.items()):
            waiting -= group.check(waiting)
            if group.is_empty:
                del self._groups[way]
        self.schedule_check()
