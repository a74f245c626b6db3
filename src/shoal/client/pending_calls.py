"""Open calls: their construction, and the limit of their memory."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shoal.client import messages
from shoal.client.blobs import Blob
from shoal.client.encoding import (
    EncodedArguments,
    ReadResult,
    RemoteFunction,
    as_code_arguments,
    inline_arguments,
)
from shoal.client.errors import CodeRefused, PlainValuesOnly
from shoal.client.options import OnProgress, Options
from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    ShoalError,
    TooLarge,
    UnknownTask,
)
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
        ...

    def drop(self, call: ClientCall) -> None:
        """Stop a call whose result is not wanted any more."""
        ...

    def replace(self, old: ClientCall, new: ClientCall) -> bool:
        """Send a call in the place of one that has ended; False if it was cancelled.

        Called where calls end, and does not wait for memory.
        """
        ...


@dataclass(slots=True)
class CodeCall:
    """What to send if no worker has a function of the program itself.

    ``unknown`` is the error of the call by name, once it has failed.
    """

    build: Callable[[], ClientCall]
    unknown: UnknownTask | None = None


@dataclass(slots=True)
class PlainCall:
    """What to send if the workers with the function take plain values only.

    ``build`` raises PlainValuesOnly naming an argument that is not plain, and TooLarge.
    """

    build: Callable[[], ClientCall]


class CallResultFuture(Protocol):
    """A future for the result of a call, of ``asyncio`` or of ``concurrent``."""

    call: ClientCall | None
    read: ReadResult
    carrier: CallCarrier
    as_code: "CodeCall | None"
    as_plain: "PlainCall | None"

    def set_cancelled(self, reason: str) -> None: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


def resolve_future(
    future: CallResultFuture, value: bytes | None, error: Exception | None
) -> None:
    """Set the result of a call: its ``value`` in MessagePack, or an error."""
    if future.as_code is not None and error is not None:
        if _send_as_code(future, future.as_code, error):
            return
        error = _error_as_code(future.as_code, error)
    if future.as_plain is not None and isinstance(error, PlainValuesOnly):
        unsendable = _send_as_plain(future, future.as_plain, error)
        if unsendable is None:
            return
        error = unsendable
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


def _send_as_code(future: CallResultFuture, code: CodeCall, error: Exception) -> bool:
    """Send a call again, as code, if no worker has its function."""
    if code.unknown is not None or not isinstance(error, UnknownTask):
        return False
    assert future.call is not None
    code.unknown = error
    try:
        call = code.build()
    except InvalidRequest as unsendable:
        error.add_note(str(unsendable))
        return False
    old, future.call = future.call, call
    return future.carrier.replace(old, call)


def _send_as_plain(
    future: CallResultFuture, plain: PlainCall, error: PlainValuesOnly
) -> Exception | None:
    """Send a call again with its blobs in place; return the error if it cannot be."""
    assert future.call is not None
    future.as_plain = None
    try:
        call = plain.build()
    except PlainValuesOnly as named:
        return PlainValuesOnly(f"{named}: {error}")
    except TooLarge as too_large:
        return too_large
    old, future.call = future.call, call
    future.carrier.replace(old, call)
    return None


def _error_as_code(code: CodeCall, error: Exception) -> Exception:
    """Return the error of a function that no worker has and none runs as code."""
    if code.unknown is None or not isinstance(error, CodeRefused):
        return error
    return UnknownTask(
        f"{code.unknown}, and one with `shoal join … --trust-code` would run it: it is "
        "a function of the program itself, which can be sent"
    )


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
        function: RemoteFunction,
        arguments: EncodedArguments,
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

    def build_as_code(
        self,
        function: RemoteFunction,
        arguments: EncodedArguments,
        on_ended: OnEnded,
        count: int,
        index: int | None = None,
    ) -> CodeCall | None:
        """Return the call as code, to send if no worker has the function.

        ``count`` is the number of positional arguments, and ``index`` as in ``build``.
        """
        if (as_code := function.as_code) is None:
            return None

        def build() -> ClientCall:
            code = as_code()
            encoded = as_code_arguments(code, arguments, count)
            return self.build(code, encoded, on_ended, index)

        return CodeCall(build)

    def build_as_plain(
        self,
        function: RemoteFunction,
        arguments: EncodedArguments,
        on_ended: OnEnded,
        index: int | None = None,
    ) -> PlainCall | None:
        """Return the call with its blobs in place, to send if workers take no others.

        ``index`` is as in ``build``.
        """
        if not arguments.not_plain or function.code:
            return None

        def build() -> ClientCall:
            inline = inline_arguments(arguments)
            return self.build(function, inline, on_ended, index)

        return PlainCall(build)

    def _key(self, number: int, index: int | None) -> str:
        if not self.options.key:
            return self._numbers.key(number)
        return self.options.key if index is None else f"{self.options.key}/{index}"
