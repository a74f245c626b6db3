"""Jobs that wait to be submitted: each free place in the queue takes one of them."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable

from shoal.coordinator.hub import Hub


class QueueReservation:
    """A place in the queue for a job that is about to be submitted."""

    def __init__(self, backlog: "Backlog", since: int) -> None:
        self._backlog: Backlog | None = backlog
        self._since = since

    def release(self, *, refused: bool = False) -> None:
        """End the reservation: the job was submitted, or is not going to be.

        ``refused`` says that the queue did not take the job after all.  Does nothing
        the second time.
        """
        backlog, self._backlog = self._backlog, None
        if backlog is not None:
            backlog.on_release(self._since if refused else None)


class Backlog:
    """The jobs of one owner that wait for a place in the queue, in their order.

    Retrying all of them for each free place would cost the square of their
    number: only as many begin as there are places.
    """

    def __init__(self, hub: Hub, owner: str) -> None:
        self._hub = hub
        self._owner = owner
        # Ordered: a plain dict takes ever longer to find its first item when those
        # before it were removed.
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._reserved = 0  # places of jobs that have begun, and are not submitted yet
        self._refused = False  # whether the last of them was, since the queue changed
        self._changes = 0  # of the queue
        self._listening = False  # whether the hub announces the next one

    def add(self, number: Hashable, submit: Callable[[], None]) -> None:
        """Have ``submit`` called when there is a place, from the next ``flush`` on.

        It must submit the job before it returns, and must not raise.
        """
        self._waiting[number] = submit

    async def reserve(
        self, number: Hashable, *, again: bool = False
    ) -> QueueReservation:
        """Wait for a place; the caller releases what is returned.

        ``again`` is for a job that was refused: it is the next.
        """
        turn: asyncio.Future[QueueReservation] = (
            asyncio.get_running_loop().create_future()
        )

        def begin() -> None:
            if not turn.done():  # its task was cancelled otherwise
                self._reserved += 1
                turn.set_result(QueueReservation(self, self._changes))

        self.add(number, begin)
        if again:
            self._waiting.move_to_end(number, last=False)
        self.flush()
        try:
            return await turn
        except asyncio.CancelledError:
            self.remove(number)
            if not turn.cancelled():
                turn.result().release()
            raise

    def remove(self, number: Hashable) -> bool:
        """Remove a job; return whether it was still waiting."""
        return self._waiting.pop(number, None) is not None

    def clear(self) -> None:
        """Take all jobs out."""
        self._waiting.clear()

    def flush(self) -> None:
        """Begin as many jobs as there are places for."""
        while self._waiting and not self._refused and self._has_place:
            self._begin_next()
        if (self._waiting or self._reserved) and not self._listening:
            self._listening = True
            self._hub.on_queue_room(self._on_change)

    def on_release(self, refused_since: int | None) -> None:
        """Handle the end of a reservation.

        ``refused_since`` counts the changes of the queue before it, if it was refused.
        """
        self._reserved -= 1
        # A job that was refused although there is a place waits for the next change of
        # the queue: trying again at once would keep the hub busy.
        self._refused = refused_since == self._changes
        if self._waiting:
            # In the next turn of the loop, when the holder has submitted its job.
            asyncio.get_running_loop().call_soon(self.flush)

    @property
    def _has_place(self) -> bool:
        return self._hub.queue_room(self._owner) > self._reserved

    def _begin_next(self) -> None:
        _, submit = self._waiting.popitem(last=False)
        submit()

    def _on_change(self) -> None:
        self._listening = False
        self._changes += 1
        if self._refused and self._waiting and not self._reserved and self._has_place:
            self._begin_next()  # and the others, if this one is taken
        self.flush()
