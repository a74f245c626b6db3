"""A call that a process makes, as its worker has it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from shoal.domain.errors import InvalidRequest, JobError, ShoalError, Unavailable
from shoal.tasks import orders
from shoal.tasks.port import Remark
from shoal.tasks.running import LACKING, REFUSED

_ERRORS: dict[int, type[ShoalError]] = {REFUSED: InvalidRequest, LACKING: Unavailable}


class OneCall:
    """A call that a process makes, until it returns."""

    def __init__(
        self, number: int, remark: Remark, blob: Callable[[bytes], None]
    ) -> None:
        self.number = number
        self.returned = False
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.limit: tuple[asyncio.Timeout, float | None] | None = None
        self._remark = remark
        self._blob = blob

    def heard(self, head: Sequence[Any], tail: bytes) -> None:
        code, about = head[0], head[1]
        if code == orders.LACKS:
            self._blob(about)
        elif about != self.number:
            return  # progress of a thread that the one before has left
        elif code == orders.SAID:
            self._remark(*head[2:])
        elif code == orders.BEGAN:
            self._begun()
        elif not self.result.done():
            self.returned = True
            if code == orders.DONE:
                self.result.set_result(tail)
            else:
                error = _ERRORS.get(head[2], JobError)
                self.result.set_exception(error(tail.decode()))

    def _begun(self) -> None:
        if self.limit is None or self.result.done():
            return
        limit, timeout = self.limit
        if timeout is not None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout)

    def lost(self, why: str) -> None:
        if not self.result.done():
            self.result.set_exception(JobError(why))
