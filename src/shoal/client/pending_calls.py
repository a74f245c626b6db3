"""Open calls: their construction, and the limit of their memory."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shoal.client import encoding, messages
from shoal.client.connection import Blob
from shoal.client.errors import CodeRefused, PlainValuesOnly
from shoal.client.options import OnProgress, Options
from shoal.domain import errors
from shoal.tasks.registry import PYTHON

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
    trust: bool = False  # whether what its worker sends may be unpickled
    started: bool = False  # whether a worker has reported it
    # Alternatives to send: if no worker has a function of the program itself, and if
    # those that have it take plain values only.
    as_code: "Callable[[], ClientCall] | None" = None
    as_plain: "Callable[[], ClientCall] | None" = None
    # The error of the call by name, before this one.
    unknown: errors.UnknownTask | None = None

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

    def release(self, call: ClientCall) -> bool:
        """Count a call as ended; False if it was already."""

    def drop(self, call: ClientCall) -> None:
        """Stop a call whose result is not wanted any more."""

    def replace(self, old: ClientCall, new: ClientCall) -> bool:
        """Send a call in the place of one that has ended; False if it was cancelled.

        Called where calls end, and does not wait for memory.
        """


class CallResultFuture(Protocol):
    """A future for the result of a call, of ``asyncio`` or of ``concurrent``."""

    call: ClientCall | None
    read: encoding.ReadResult
    carrier: CallCarrier

    def set_cancelled(self, reason: str) -> None: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


def resolve_future(
    future: CallResultFuture, value: bytes | None, error: Exception | None
) -> None:
    """Set the result of a call: its ``value`` in MessagePack, or an error."""
    call = future.call
    assert call is not None
    if error is not None:
        instead = _instead_of(call, error)
        if isinstance(instead, ClientCall):
            future.call = instead
            future.carrier.replace(call, instead)
            return
        error = instead
    result = None
    if value is not None:
        try:
            result = future.read(value)
        except errors.ShoalError as unreadable:
            error = unreadable
    if not future.carrier.release(call):
        return  # it was cancelled in the meantime
    if isinstance(error, errors.Cancelled):  # not by this program
        future.set_cancelled(str(error))
    elif error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _instead_of(call: ClientCall, error: Exception) -> ClientCall | Exception:
    """Return what to send in the place of a call that failed; else its error."""
    if isinstance(error, errors.UnknownTask) and call.as_code is not None:
        try:
            code = call.as_code()
        except errors.InvalidRequest as unsendable:
            error.add_note(str(unsendable))
            return error
        code.as_plain, code.unknown = call.as_plain, error
        return code
    if isinstance(error, CodeRefused) and call.unknown is not None:
        return errors.UnknownTask(
            f"{call.unknown}, and one with `shoal join … --trust-code` would run it: "
            "it is a function of the program itself, which can be sent"
        )
    if isinstance(error, PlainValuesOnly) and call.as_plain is not None:
        try:
            plain = call.as_plain()
        except PlainValuesOnly as named:
            return PlainValuesOnly(f"{named}: {error}")
        except errors.TooLarge as too_large:
            return too_large
        plain.as_code, plain.unknown = call.as_code, call.unknown
        return plain
    return error


CALL_MEMORY_MAX = 256 << 20  # bytes of all open calls; further submissions wait


class CallMemory:
    """Counts the bytes of open calls; a shared blob counts once."""

    def __init__(self) -> None:
        self._size = 0
        self._blobs: dict[bytes, tuple[Blob, int]] = {}

    def add(self, call: ClientCall, *, force: bool = False) -> bool:
        """Count a call if there is room; a single call always has room.

        Replaces its blobs by equal ones of other calls.
        """
        size = call.size
        if call.blobs:
            size += self._new_blob_size(call)
        if self._size + size > CALL_MEMORY_MAX and self._size and not force:
            return False
        self._size += size
        if call.blobs:
            call.blobs = tuple(self._shared_blob(blob) for blob in call.blobs)
        return True

    def remove(self, call: ClientCall) -> None:
        """Stop counting a call."""
        self._size -= call.size
        for blob in call.blobs:
            shared, users = self._blobs.pop(blob.digest)
            if users > 1:
                self._blobs[blob.digest] = shared, users - 1
            else:
                self._size -= shared.size

    def _new_blob_size(self, call: ClientCall) -> int:
        """Return the size of a call's blobs that no other call has."""
        sizes = {each.digest: each.size for each in call.blobs}
        return sum(sizes[digest] for digest in sizes.keys() - self._blobs.keys())

    def _shared_blob(self, blob: Blob) -> Blob:
        shared, users = self._blobs.get(blob.digest, (blob, 0))
        self._blobs[blob.digest] = shared, users + 1
        return shared


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
        self._encoded_options = {**options.encode(), "exact": options.exact}
        self._retryable = options.durable or options.retry

    def build(
        self,
        function: encoding.RemoteFunction,
        arguments: encoding.EncodedArguments,
        on_ended: OnEnded,
        index: int | None = None,
    ) -> ClientCall:
        """Return a call; ``index`` is its position in a ``map``."""
        number = self._numbers.number()
        options = self._encoded_options
        if arguments.needs or arguments.digests or self.options.durable:
            options = {**options}
            if function.timeout is not None:
                options.setdefault("timeout", float(function.timeout))
            if arguments.needs:
                options["needs"] = arguments.needs
            if function.code:
                options["python"] = PYTHON
            if arguments.digests:
                options["blobs"] = arguments.digests
            if self.options.durable:
                options["key"] = self._key(number, index)
                if not self.options.key:
                    options["fresh"] = True
        return ClientCall(
            number,
            function.name,
            arguments.args,
            arguments.kwargs,
            options,
            on_ended,
            self._retryable,
            arguments.blobs,
            self.options.on_progress,
            home=function.home,
            sends_code=bool(function.code),
            trust=function.trust,
        )

    def build_with_alternatives(
        self,
        function: encoding.RemoteFunction,
        arguments: encoding.EncodedArguments,
        on_ended: OnEnded,
        count: int,
        index: int | None = None,
    ) -> ClientCall:
        """Return a call that is sent as code, or with plain values, if need be.

        ``count`` is the number of positional arguments, and ``index`` as in ``build``.
        """
        call = self.build(function, arguments, on_ended, index)

        def as_code() -> ClientCall:
            assert function.as_code is not None, "it can be sent as code"
            code = function.as_code()
            encoded = encoding.as_code_arguments(code, arguments, count)
            return self.build(code, encoded, on_ended, index)

        def as_plain() -> ClientCall:
            return self.build(
                function, encoding.inline_arguments(arguments), on_ended, index
            )

        if function.as_code is not None:
            call.as_code = as_code
        if arguments.not_plain and not function.code:
            call.as_plain = as_plain
        return call

    def _key(self, number: int, index: int | None) -> str:
        if not self.options.key:
            return self._numbers.key(number)
        return self.options.key if index is None else f"{self.options.key}/{index}"
