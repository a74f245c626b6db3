"""A task process's ends of its pipes, and what tasks print.

All that tasks print goes to standard error.  A mark there shows where a call begins,
so that the worker quotes of a crashed call what that one printed, and nothing else.
"""

import io
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from shoal.tasks.invocation import InvocationResult
from shoal.tasks.limits import FLUSH_DELAY
from shoal.tasks.process_messages import RETURNS, SIZES, encode_head

READ_SIZE = 1 << 18  # bytes asked for at a time
FLUSH_INTERVAL = 5 * FLUSH_DELAY  # seconds between looks at what a slow call holds up

Message: TypeAlias = tuple[list[Any], memoryview]
"""The head and the tail of a message."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ParentExited(Exception):
    """The worker has ended, so that there is nothing more to do."""


class ChildPipes:
    """Messages in and out; any thread may send.

    Returns of a lane are told several at a time.  When the next call takes long, a
    thread tells those that wait: the call may hold up nobody but itself.
    """

    def __init__(self, orders: int, replies: int) -> None:
        self._orders = os.fdopen(orders, "rb", buffering=0)
        self._replies = replies
        self._rest = b""  # the beginning of a message
        self._inbox: deque[Message] = deque()
        self._sending = threading.Lock()
        self._returns: list[tuple[int, bytes, str]] = []
        self._first = 0.0  # when the first of them came
        self._many = threading.Event()  # set while some may have to wait
        self._teller: threading.Thread | None = None

    def next(self) -> Message:
        """Wait for a message.  Raises Gone if the worker has ended."""
        if not self._inbox:
            self.flush()
            self._many.clear()
            while not self._inbox:
                self._read()
        return self._inbox.popleft()

    def next_with(self, code: int) -> Message:
        """Wait for a message that begins with ``code``; others wait for their turn."""
        passed: list[Message] = []
        while (order := self.next())[0][0] != code:
            passed.append(order)
        self._inbox.extendleft(reversed(passed))
        return order

    def send(self, head: tuple[Any, ...], tail: bytes = b"") -> None:
        """Send a message, waiting for a worker that reads slowly."""
        with self._sending:
            self._write(encode_head(head, len(tail)))
            if tail:
                self._write(tail)

    def send_return(self, number: int, returned: InvocationResult) -> None:
        """Tell soon what came of a call in a lane."""
        now = monotonic()
        if not self._returns:
            self._first = now
        self._returns.append((number, returned.value, returned.error))
        if now - self._first > FLUSH_DELAY:
            self.flush()

    def flush_in_background(self) -> None:
        """Have returns told also while a call runs that comes after them."""
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()
        self._many.set()

    def flush(self) -> None:
        """Tell what has come of calls so far."""
        with self._sending:
            returns, self._returns = self._returns, []
            if returns:
                tail = _encode(returns)
                self._write(encode_head((RETURNS,), len(tail)) + tail)

    def _tell(self) -> None:
        pause = threading.Event()
        while self._many.wait():
            pause.wait(FLUSH_INTERVAL)
            if self._returns:
                self.flush()

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        try:
            while unsent:
                unsent = unsent[os.write(self._replies, unsent) :]
        except OSError as error:
            raise ParentExited from error

    def _read(self) -> None:
        """Take what there is, at least something, into the inbox."""
        data = self._orders.read(READ_SIZE)
        if not data:
            raise ParentExited
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= SIZES.size:
            size, head_size = SIZES.unpack_from(data, at)
            at += SIZES.size
            if end - at < size:
                self._inbox.append(_cut(self._whole(data[at:], size), head_size))
                self._rest = b""
                return
            self._inbox.append(_cut(memoryview(data)[at : at + size], head_size))
            at += size
        self._rest = data[at:]

    def _whole(self, begun: bytes, size: int) -> memoryview:
        """Read the rest of a message to where it stays, so that arrays lie on it."""
        whole = memoryview(bytearray(size))
        whole[: len(begun)] = begun
        at = len(begun)
        while at < size:
            got = self._orders.readinto(whole[at:])
            if not got:
                raise ParentExited
            at += got
        return whole


def _cut(whole: memoryview, head_size: int) -> Message:
    head: list[Any] = _decode(whole[:head_size])
    return head, whole[head_size:]


MARK = b"\0"
"""One byte, which no read of a pipe can cut, and which texts do not have."""

_STDERR = 2


class TaskOutput:
    """Python's streams of this process, which are replaced by ones that take notice."""

    def __init__(self) -> None:
        self._out, self._err = _Stream(1, "replace"), _Stream(2, "backslashreplace")
        sys.stdout = self._out
        sys.stderr = self._err

    @property
    def written(self) -> bool:
        """Whether Python has written anything since the last mark.

        What is written beside Python is not seen: by libraries in C, or by programs
        that a task starts.
        """
        return self._out.used or self._err.used

    def mark_call(self) -> None:
        """Write a mark, for what comes is of another call."""
        for stream in (self._out, self._err):
            # A task may have closed them.
            with suppress(OSError, ValueError):
                stream.flush()
            stream.used = False
        with suppress(OSError):
            os.write(_STDERR, MARK)


def last_call_output(log: bytes, data: bytes) -> bytes:
    """Return what the latest call has printed, of a log and what was read after it."""
    _, mark, after = data.rpartition(MARK)
    return after if mark else log + data


class _Stream(io.TextIOWrapper):
    """A standard stream that notes whether it was used."""

    def __init__(self, number: int, errors: str) -> None:
        # Asking the stream that is there would not do: it may be none.
        raw = os.fdopen(number, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors=errors, line_buffering=True)
        self.used = False

    def write(self, text: str, /) -> int:
        self.used = True
        return super().write(text)
