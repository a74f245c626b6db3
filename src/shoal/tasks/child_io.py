"""A task process's ends of its pipes, and the output of tasks.

All output of tasks goes to standard error.  A mark there separates calls, so that the
worker's error for a crashed call quotes the output of that call only.
"""

import io
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from time import monotonic  # noqa: TID251  # a process of its own
from typing import Any, TypeAlias

import msgspec

from shoal.processes.programs import write_all
from shoal.tasks.invocation import InvocationResult
from shoal.tasks.limits import FLUSH_DELAY
from shoal.tasks.process_messages import RETURNS, SIZES, encode_head

READ_SIZE = 1 << 18  # bytes of a read
FLUSH_INTERVAL = 5 * FLUSH_DELAY  # seconds between flushes during a slow call

Message: TypeAlias = tuple[list[Any], memoryview]
"""The head and the tail of a message."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ParentExited(Exception):
    """The worker has ended."""


class ChildPipes:
    """Messages in and out; any thread may send.

    Returns of a call stream share messages.  During a long call, a thread sends the
    pending returns of earlier ones.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = os.fdopen(commands, "rb", buffering=0)
        self._replies = replies
        self._rest = b""  # the beginning of a message
        self._inbox: deque[Message] = deque()
        self._sending = threading.Lock()
        self._returns: list[tuple[int, bytes, str]] = []
        self._first_at = 0.0  # when the first of them came
        self._returns_pending = threading.Event()  # set while returns may be pending
        self._flusher: threading.Thread | None = None

    def next(self) -> Message:
        """Wait for a message.  Raises ParentExited if the worker has ended."""
        if not self._inbox:
            self.flush()
            self._returns_pending.clear()
            while not self._inbox:
                self._read()
        return self._inbox.popleft()

    def next_with(self, code: int) -> Message:
        """Wait for a message that begins with ``code``; others wait for their turn."""
        skipped: list[Message] = []
        while (command := self.next())[0][0] != code:
            skipped.append(command)
        self._inbox.extendleft(reversed(skipped))
        return command

    def send(self, head: tuple[Any, ...], tail: bytes = b"") -> None:
        """Send a message, waiting for a worker that reads slowly."""
        with self._sending:
            self._write(encode_head(head, len(tail)))
            if tail:
                self._write(tail)

    def send_return(self, number: int, returned: InvocationResult) -> None:
        """Queue the return of a call in a stream."""
        now = monotonic()
        if not self._returns:
            self._first_at = now
        self._returns.append((number, returned.value, returned.error))
        if now - self._first_at > FLUSH_DELAY:
            self.flush()

    def flush_in_background(self) -> None:
        """Send queued returns also while a later call runs."""
        if self._flusher is None:
            self._flusher = threading.Thread(
                target=self._flush_periodically, daemon=True
            )
            self._flusher.start()
        self._returns_pending.set()

    def flush(self) -> None:
        """Send the queued returns."""
        with self._sending:
            returns, self._returns = self._returns, []
            if returns:
                tail = _encode(returns)
                self._write(encode_head((RETURNS,), len(tail)) + tail)

    def _flush_periodically(self) -> None:
        pause = threading.Event()
        while self._returns_pending.wait():
            pause.wait(FLUSH_INTERVAL)
            if self._returns:
                self.flush()

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._replies, data)
        except OSError as error:
            raise ParentExited from error

    def _read(self) -> None:
        """Read at least one byte into the inbox."""
        data = self._commands.read(READ_SIZE)
        if not data:
            raise ParentExited
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= SIZES.size:
            size, head_size = SIZES.unpack_from(data, at)
            at += SIZES.size
            if end - at < size:
                self._inbox.append(
                    _split_message(self._read_long(data[at:], size), head_size)
                )
                self._rest = b""
                return
            self._inbox.append(
                _split_message(memoryview(data)[at : at + size], head_size)
            )
            at += size
        self._rest = data[at:]

    def _read_long(self, beginning: bytes, size: int) -> memoryview:
        """Read the rest of a message into its final buffer, which arrays share."""
        message = memoryview(bytearray(size))
        message[: len(beginning)] = beginning
        at = len(beginning)
        while at < size:
            count = self._commands.readinto(message[at:])
            if not count:
                raise ParentExited
            at += count
        return message


def _split_message(message: memoryview, head_size: int) -> Message:
    head: list[Any] = _decode(message[:head_size])
    return head, message[head_size:]


MARK = b"\0"
"""One byte, which no read of a pipe can split, and which texts do not contain."""

_STDERR = 2


class TaskOutput:
    """Replaces Python's standard streams by ones that detect output."""

    def __init__(self) -> None:
        self._out, self._err = _Stream(1, "replace"), _Stream(2, "backslashreplace")
        sys.stdout = self._out
        sys.stderr = self._err

    @property
    def written(self) -> bool:
        """Whether Python has written anything since the last mark.

        Output of C libraries and of child processes is not detected.
        """
        return self._out.used or self._err.used

    def mark_call(self) -> None:
        """Write a mark: another call begins."""
        for stream in (self._out, self._err):
            # A task may have closed them.
            with suppress(OSError, ValueError):
                stream.flush()
            stream.used = False
        with suppress(OSError):
            os.write(_STDERR, MARK)


def last_call_output(log: bytes, data: bytes) -> bytes:
    """Return the output of the latest call, from a log and data read after it."""
    _, mark, after = data.rpartition(MARK)
    return after if mark else log + data


class _Stream(io.TextIOWrapper):
    """A standard stream that records whether it was used."""

    def __init__(self, number: int, errors: str) -> None:
        # The existing stream may be None.
        raw = os.fdopen(number, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors=errors, line_buffering=True)
        self.used = False

    def write(self, text: str, /) -> int:
        self.used = True
        return super().write(text)
