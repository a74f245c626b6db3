"""One of the calls or lanes that a cluster makes at the same time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.tasks import orders
from shoal.tasks.process import Timeouts, User
from shoal.tasks.running import LACKING


class Send(Protocol):
    def __call__(self, head: tuple[Any, ...], *tail: bytes) -> None: ...


class RaySlot:
    """What stands for a process: a ``Runner``.

    There is something in the cluster only while it has a user; a lane's actor goes with
    the lane, so that others can have its processor.

    Args:
        send: passes an order on.
        ended: called soon after it was killed, or what ran there has ended by itself.
    """

    def __init__(
        self, timeouts: Timeouts, send: Send, ended: Callable[["RaySlot"], None]
    ) -> None:
        self.timeouts = timeouts
        # Ray may have calls wait, for a processor or a process of its own.
        self.late = True
        self._send = send
        self._on_end = ended
        self._user: User | None = None
        self._call: int | None = None  # the number of the one that runs
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def user(self) -> User | None:
        return self._user

    @user.setter
    def user(self, user: User | None) -> None:
        if user is None and self._user is not None and self._call is None:
            self._send((orders.STOP,))
        self._user, self._call = user, None

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        if self._over.done():
            return
        if head[0] == orders.CALL:
            self._call = head[1]
        self._send(head, *tail)

    def kill(self) -> None:
        self._send((orders.STOP,))
        self._end()

    async def gone(self) -> None:
        await asyncio.shield(self._over)

    def heard(self, head: Sequence[Any], tail: bytes) -> None:
        """Take what is said of what runs here."""
        if head[0] == orders.LOST:
            user, self._user = self._user, None
            self._end()
            if user is not None:
                user.lost(head[1])
        elif self._user is not None and self._is_of_user(head):
            self._user.heard(head, tail)

    def _is_of_user(self, head: Sequence[Any]) -> bool:
        """Say whether it is not about a call that has been over for a moment.

        What calls say goes another way than what they return, and may come later.
        """
        if head[0] == orders.LACKS:
            return True
        return (head[1] if len(head) > 1 else None) == self._call

    def unavailable(self, why: str) -> None:
        """Learn that the cluster is lost.

        A call may be made elsewhere.  Who has a lane is to give that up by itself: its
        calls are then given to others, which they are not if they return an error.
        """
        if self._user is not None and self._call is not None:
            self._user.heard((orders.RAISED, self._call, LACKING), why.encode())

    def _end(self) -> None:
        """End after whoever calls this has done what it is about."""
        if not self._over.done():
            self._over.set_result(None)
            asyncio.get_running_loop().call_soon(self._on_end, self)
