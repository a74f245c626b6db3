"""What will become of a call, for programs that block."""

from concurrent.futures import Future
from typing import Any, Protocol

from shoal.client.asked import Asked
from shoal.client.results import Read
from shoal.domain.errors import Cancelled, ShoalError


class Carrying(Protocol):
    """What carries calls."""

    def release(self, asked: Asked) -> bool:
        """Count a call as ended; False if it was already."""
        ...

    def drop(self, asked: Asked) -> None:
        """Stop a call: nobody waits for it any more."""
        ...


class CallFuture(Future[Any]):
    """What will become of a call; cancelling it stops the worker.

    ``job_id`` names its job once the coordinator has accepted it, if it is durable; and
    ``running`` is true from when a worker has it.
    """

    def __init__(self, read: Read, background: Carrying) -> None:
        super().__init__()
        self._read = read
        self._background = background
        self.asked: Asked | None = None  # once it is submitted

    @property
    def job_id(self) -> str:
        """The id of its job; empty: there is none, or not yet."""
        return "" if self.asked is None else self.asked.job_id

    def running(self) -> bool:
        # That of the base class is for calls that cannot be cancelled any more.
        return self.asked is not None and self.asked.begun and not self.done()

    def cancel(self) -> bool:
        # Whoever releases the call says what becomes of it, and nobody else does.
        if self.asked is None or not self._background.release(self.asked):
            return self.cancelled()
        self._background.drop(self.asked)
        self._give_up()
        return True

    def ended(self, value: bytes | None, error: Exception | None) -> None:
        """Take what became of the call."""
        result = None
        if value is not None:
            try:
                result = self._read(value)
            except ShoalError as unreadable:
                error = unreadable
        assert self.asked is not None
        if not self._background.release(self.asked):
            return  # it was cancelled in the meantime
        if isinstance(error, Cancelled):  # by somebody else
            self._give_up()
        elif error is None:
            self.set_result(result)
        else:
            self.set_exception(error)

    def _give_up(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()
