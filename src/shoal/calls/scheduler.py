"""The pending calls of one owner, and the streams that carry them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from shoal.calls.group import CallGroup, CallRoute
from shoal.calls.stream import PendingCall
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.vocabulary import CallName, CallResult, StreamedCall
from shoal.domain.work import CALL_QUEUE, TASK_QUEUE
from shoal.transports.clock import Clock, Timer

CHECK_INTERVAL = 0.05  # seconds between checks of the streams


class CallListener(Protocol):
    """Receives the events of calls, by their numbers."""

    def on_pushed(self, numbers: Sequence[int], worker_id: WorkerId) -> None:
        """Calls were sent to a worker, which runs them one after the other."""

    def on_requeued(self, numbers: Sequence[int], reason: str, *, lost: bool) -> None:
        """Calls without a result wait again; ``lost``: with their worker."""

    def on_results(self, returns: Iterable[CallResult]) -> None:
        """Receive results, one for each call."""

    def on_failure(self, number: int, error: ShoalError) -> None:
        """Handle the failure of a call."""


class CallScheduler:
    """The pending calls of one owner, by number.

    It never blocks: calls are sent when ``flush`` is called, and the rest when results
    arrive.
    """

    def __init__(
        self, hub: Hub, clock: Clock, owner: str, listener: CallListener
    ) -> None:
        self.hub = hub
        self.clock = clock
        self.owner = owner
        self.listener = listener
        self.pending: dict[int, tuple[PendingCall, CallGroup]] = {}
        self._groups: dict[CallRoute, CallGroup] = {}
        self._timer: Timer | None = None
        self._closed = False
        self.held = False  # whether no call is sent for now

    def submit(
        self,
        route: CallRoute,
        call: StreamedCall,
        blobs: tuple[bytes, ...] = (),
        name: CallName | None = None,
    ) -> None:
        """Add a call, with its name if it is stored; ``flush`` sends it."""
        group = self._groups.get(route)
        if group is None:
            group = self._groups[route] = CallGroup(self, route)
        pending = PendingCall(call, blobs, name, self.clock.now() + route.queue)
        self.pending[call.number] = (pending, group)
        group.waiting.append(pending)

    def flush(self) -> None:
        """Send waiting calls to streams, and open more streams if needed."""
        for group in list(self._groups.values()):
            if group.waiting:
                group.flush()
        self.schedule_check()

    def rename(self, number: int, name: CallName) -> None:
        """Give a call another name, under which it is sent to its next worker."""
        if (known := self.pending.get(number)) is not None:
            known[0].name = name

    def stream_of(self, number: int) -> JobId | None:
        """Return the stream that has a call; None: it waits, or has ended."""
        known = self.pending.get(number)
        return None if known is None else known[0].stream_id

    def cancel(self, number: int) -> bool:
        """Cancel a call; return whether it was pending."""
        known = self.pending.pop(number, None)
        if known is None:
            return False
        pending, group = known
        group.cancel(pending)
        return True

    def close(self) -> None:
        """Cancel all calls: the client has left.

        Streams that cannot cancel are tracked until their calls end.
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

    def pause(self) -> None:
        """Push no more calls.  Each slot is released when its last call has ended."""
        for group in self._groups.values():
            group.pause()

    def hold(self) -> None:
        """Push no more calls, and open no streams, until ``resume``."""
        self.held = True

    def resume(self) -> None:
        """Push calls again."""
        self.held = False
        self.flush()

    # For the groups.

    def remove_finished(self) -> None:
        """After ``close``, remove empty groups, and with the last one the timer."""
        if not self._closed:
            return
        for route, group in list(self._groups.items()):
            if group.is_empty:
                del self._groups[route]
        if self._timer is not None and not self._groups:
            self._timer.cancel()
            self._timer = None

    def schedule_check(self) -> None:
        """Schedule a check of all streams."""
        if self._timer is None and self._groups:
            due = self.clock.now() + CHECK_INTERVAL
            if self._closed:  # only timeouts are left to check
                due = max(due, min(group.due for group in self._groups.values()))
            self._timer = self.clock.call_at(due, self._check)

    def fail(self, calls: Iterable[PendingCall], error: ShoalError) -> None:
        """Fail calls."""
        for each in calls:
            if self.pending.pop(each.call.number, None) is not None:
                self.listener.on_failure(each.call.number, error)

    def _check(self) -> None:
        self._timer = None
        queues = self.hub.pool.queues
        waiting = sum(len(queues.get(each, ())) for each in (CALL_QUEUE, TASK_QUEUE))
        for route, group in list(self._groups.items()):
            waiting -= group.check(waiting)
            if group.is_empty:
                del self._groups[route]
        self.schedule_check()
