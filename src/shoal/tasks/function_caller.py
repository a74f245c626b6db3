"""The FunctionCaller port: what a worker needs from something that calls functions."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream

FetchBlob: TypeAlias = Callable[[bytes], Awaitable[Path]]
"""Returns the file with what is known by a SHA-256 digest, for all processes to read.

Raises Unavailable if nobody gives it.
"""

OnProgress: TypeAlias = Callable[[float | None, str], None]
"""Takes how far a call has come, from 0 to 1, and what it says about that."""


class CallStreamSlot(Protocol):
    """A slot that calls one function again and again, one call after the other."""

    @property
    def idle(self) -> bool:
        """Whether all has returned that was pushed."""
        ...

    def push(self, calls: Sequence[StreamedCall]) -> None:
        """Have these called after those that were pushed before."""
        ...

    def recall(self, numbers: Sequence[int]) -> None:
        """Do not make these calls, or stop in the middle: nothing returns of them."""
        ...

    def close(self) -> None:
        """Stop whatever runs, and give the slot back at once."""
        ...


class FunctionCaller(Protocol):
    """Calls functions, each in a process that can be killed.

    ``names`` are those of the functions that it has; ``trusts_code`` says that it also
    calls those that are sent along.
    """

    slots: int
    """How many calls it makes at the same time."""
    names: frozenset[str]
    trusts_code: bool

    async def start(self) -> None:
        """Make ready.  Raises ConfigError if that can never work."""
        ...

    async def call(self, call: Call, fetch: FetchBlob, remark: OnProgress) -> bytes:
        """Make a call; return what came of it, as a value in MessagePack.

        Cancelling stops it, whatever it does.

        Raises NotFound if there is no such function, InvalidRequest if the arguments
        cannot be read or nobody trusts the code, JobError with the traceback if it
        raised, took longer than its timeout, or returned what cannot be written, and
        Unavailable if another worker may do it.
        """
        ...

    def open_stream(
        self,
        lane: CallStream,
        fetch: FetchBlob,
        returned: Callable[[list[CallResult]], None],
    ) -> CallStreamSlot:
        """Take a slot for calls of one function; ``returned`` is told what they give.

        Raises NotFound if there is no such function, InvalidRequest if nobody trusts
        the code, Unavailable if no slot is free.
        """
        ...

    async def close(self) -> None:
        """Stop whatever runs."""
        ...
