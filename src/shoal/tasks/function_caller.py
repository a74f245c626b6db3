"""The FunctionCaller port: a worker's interface to what runs functions."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream

FetchBlob: TypeAlias = Callable[[bytes], Awaitable[Path]]
"""Returns the file with the blob of a SHA-256 digest.

Raises Unavailable if the coordinator does not send it.
"""

OnProgress: TypeAlias = Callable[[float | None, str], None]
"""Receives the progress of a call: a share from 0 to 1, and a remark."""


class CallStreamSlot(Protocol):
    """A slot that runs the calls of one function in sequence."""

    @property
    def idle(self) -> bool:
        """Whether all pushed calls have returned."""

    def push(self, calls: Sequence[StreamedCall]) -> None:
        """Append calls to the queue."""

    def recall(self, numbers: Sequence[int]) -> None:
        """Drop these calls, or abort the running one; they return nothing."""

    def close(self) -> None:
        """Abort the running call, and free the slot at once."""


class FunctionCaller(Protocol):
    """Runs functions in processes that it can kill.

    ``names`` are the registered tasks; ``trusts_code`` says whether it also runs
    functions that clients send.
    """

    slots: int
    """Number of concurrent calls."""
    on_lent: Callable[[int], None] | None
    """Receives the number of slots whose calls wait for calls of their own."""
    names: frozenset[str]
    trusts_code: bool

    async def start(self) -> None:
        """Start.  Raises ConfigError if the configuration is unusable."""

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        """Run a call; return its result in MessagePack.

        ``grant`` is as in ``RunJob``.  Cancellation aborts the function.

        Raises NotFound for an unknown function, InvalidRequest if the arguments are
        unreadable or code is not trusted, JobError with the traceback if the function
        raised, exceeded its timeout or returned an unsupported value, and Unavailable
        if another worker may run it.
        """

    def open_stream(
        self,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> CallStreamSlot:
        """Open a slot for calls of one function; ``on_returned`` gets their results.

        Raises NotFound for an unknown function, InvalidRequest if code is not trusted,
        Unavailable if no slot is free.
        """

    async def close(self) -> None:
        """Abort all calls."""
