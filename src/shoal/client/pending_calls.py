"""Open calls: their construction, and the limit of their memory."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shoal.client import messages
from shoal.client.blobs import Blob
from shoal.client.encoding import EncodedArguments, ReadResult, RemoteFunction
from shoal.client.options import OnProgress, Options
from shoal.domain.errors import Cancelled, ShoalError

OVERHEAD = 1 << 10  # bytes of a call without its arguments, about

OnEnded: TypeAlias = Callable[[bytes | None, Exception | None], None]
"""Receives the result of a call in MessagePack, or the error."""


@dataclass(slots=True, eq=False)
class ClientCall:
    """A call and its state; ``on_ended`` is called once with its result.

    ``retryable`` says whether it may be sent again after a lost connection.
    """

    number: int
    name: str
    args: bytes
    kwargs: bytes
    options: messages.WireOptions
    on_ended: OnEnded
    retryable: bool
    blobs: tuple[Blob, ...] = ()
    on_progress: OnProgress | None = None
    sent: bool = False  # on the current connection
    blobs_missing: int = 0  # blobs that are not uploaded yet
    blobs_lost: int = 0  # times that the coordinator had evicted its blobs
    job_id: str = ""  # once a durable call is accepted
    home: str = ""  # the local module of the function
    sends_code: bool = False  # whether the function is sent along
    started: bool = False  # whether a worker has reported it

    @property
    def size(self) -> int:
        """Its size in memory in bytes, without blobs."""
        return len(self.args) + len(self.kwargs) + OVERHEAD

    def mark_retried(self) -> None:
        """Mark the call as possibly known to the coordinator."""
        if "fresh" in self.options:
            self.options = {**self.options, "fresh": False}

    @property
    def item(self) -> tuple[object, ...]:
        """Its item in a message."""
        return messages.call_item(
            self.number, self.name, self.args, self.kwargs, self.options
        )


class CallCarrier(Protocol):
    """Carries the calls of a pool to its coordinator."""

    def release(self, asked: ClientCall) -> bool:
        """Count a call as ended; False if it was already."""
        ...

    def drop(self, asked: ClientCall) -> None:
        """Stop a call whose result is not wanted any more."""
        ...


class CallResultFuture(Protocol):
    """A future for the result of a call, of ``asyncio`` or of ``concurrent``."""

    call: ClientCall | None
    read: ReadResult
    carrier: CallCarrier

    def set_cancelled(self, reason: str) -> None: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


def resolve_future(
    future: CallResultFuture, value: bytes | None, error: Exception | None
) -> None:
    """Set the result of a call: its ``value`` in MessagePack, or an error."""
    result = None
    if value is not None:
        try:
            result = future.read(value)
        except ShoalError as unreadable:
            error = unreadable
    assert future.call is not None
    if not future.carrier.release(future.call):
        return  # it was cancelled in the meantime
    if isinstance(error, Cancelled):  # not by this program
        future.set_cancelled(str(error))
    elif error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


CALL_MEMORY_MAX = 256 << 20  # bytes of all open calls; further submissions wait


class CallMemory:
    """Counts the bytes of open calls; a shared blob counts once."""

    def __init__(self) -> None:
        self._size = 0
        self._blobs: dict[bytes, tuple[Blob, int]] = {}

    def add(self, asked: ClientCall, *, force: bool = False) -> bool:
        """Count a call if there is room; a single call always has room.

        Replaces its blobs by equal ones of other calls.
        """
        size = asked.size
        if asked.blobs:
            size += self._new(asked)
        if self._size + size > CALL_MEMORY_MAX and self._size and not force:
            return False
        self._size += size
        if asked.blobs:
            asked.blobs = tuple(self._kept(blob) for blob in asked.blobs)
        return True

    def remove(self, asked: ClientCall) -> None:
        """Stop counting a call."""
        self._size -= asked.size
        for blob in asked.blobs:
            kept, users = self._blobs.pop(blob.digest)
            if users > 1:
                self._blobs[blob.digest] = kept, users - 1
            else:
                self._size -= kept.size

    def _new(self, asked: ClientCall) -> int:
        """Return the size of a call's blobs that no other call has."""
        sizes = {each.digest: each.size for each in asked.blobs}
        return sum(sizes[digest] for digest in sizes.keys() - self._blobs.keys())

    def _kept(self, blob: Blob) -> Blob:
        kept, users = self._blobs.get(blob.digest, (blob, 0))
        self._blobs[blob.digest] = kept, users + 1
        return kept


class CallNumbers:
    """Issues the numbers and idempotency keys of a client's calls."""

    def __init__(self) -> None:
        self._next: Iterator[int] = itertools.count(1)
        self._client = uuid.uuid4().hex

    def number(self) -> int:
        """Return the next number."""
        return next(self._next)

    def key(self, number: int) -> str:
        """Return a globally unique key."""
        return f"{self._client}-{number}"


class CallBuilder:
    """Builds calls with the same options.

    Calls of one ``map`` have the given key with an index.
    """

    def __init__(self, options: Options, numbers: CallNumbers) -> None:
        self.options = options
        self._numbers = numbers
        self._written = options.encode()
        self._again = options.durable or options.retry

    def build(
        self,
        function: RemoteFunction,
        parcel: EncodedArguments,
        ended: OnEnded,
        index: int | None = None,
    ) -> ClientCall:
        """Return a call; ``index`` is its position in a ``map``."""
        number = self._numbers.number()
        options = self._written
        if parcel.needs or parcel.digests or self.options.durable:
            options = {**options}
            if parcel.needs:
                options["needs"] = parcel.needs
            if parcel.digests:
                options["blobs"] = parcel.digests
            if self.options.durable:
                options["key"] = self._key(number, index)
                if not self.options.key:
                    options["fresh"] = True
        return ClientCall(
            number,
            function.name,
            parcel.args,
            parcel.kwargs,
            options,
            ended,
            self._again,
            parcel.blobs,
            self.options.on_progress,
            home=function.home,
            sends_code=bool(function.code),
        )

    def _key(self, number: int, index: int | None) -> str:
        if not self.options.key:
            return self._numbers.key(number)
        return self.options.key if index is None else f"{self.options.key}/{index}"
