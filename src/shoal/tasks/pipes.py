"""A process's ends of the two pipes that lead to its worker."""

import os
import threading
from collections import deque
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from shoal.tasks.limits import FLUSH_AFTER
from shoal.tasks.orders import RETURNS, SIZES, message
from shoal.tasks.running import Returned

READ = 1 << 18  # bytes asked for at a time
LOOK_EVERY = 5 * FLUSH_AFTER  # seconds between looks at what a slow call holds up

Order: TypeAlias = tuple[list[Any], memoryview]
"""The head and the tail of a message."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Gone(Exception):
    """The worker has ended, so that there is nothing more to do."""


class Pipes:
    """Messages in and out; any thread may send.

    Returns of a lane are told several at a time.  When the next call takes long, a
    thread tells those that wait: the call may hold up nobody but itself.
    """

    def __init__(self, orders: int, replies: int) -> None:
        self._orders = os.fdopen(orders, "rb", buffering=0)
        self._replies = replies
        self._rest = b""  # the beginning of a message
        self._inbox: deque[Order] = deque()
        self._sending = threading.Lock()
        self._returns: list[tuple[int, bytes, str]] = []
        self._first = 0.0  # when the first of them came
        self._many = threading.Event()  # set while some may have to wait
        self._teller: threading.Thread | None = None

    def next(self) -> Order:
        """Wait for a message.  Raises Gone if the worker has ended."""
        if not self._inbox:
            self.flush()
            self._many.clear()
            while not self._inbox:
                self._read()
        return self._inbox.popleft()

    def next_of(self, code: int) -> Order:
        """Wait for a message that begins with ``code``; others wait for their turn."""
        passed: list[Order] = []
        while (order := self.next())[0][0] != code:
            passed.append(order)
        self._inbox.extendleft(reversed(passed))
        return order

    def send(self, head: tuple[Any, ...], tail: bytes = b"") -> None:
        """Send a message, waiting for a worker that reads slowly."""
        with self._sending:
            self._write(message(head, len(tail)))
            if tail:
                self._write(tail)

    def give(self, number: int, returned: Returned) -> None:
        """Tell soon what came of a call in a lane."""
        now = monotonic()
        if not self._returns:
            self._first = now
        self._returns.append((number, returned.value, returned.error))
        if now - self._first > FLUSH_AFTER:
            self.flush()

    def expect_many(self) -> None:
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
                self._write(message((RETURNS,), len(tail)) + tail)

    def _tell(self) -> None:
        pause = threading.Event()
        while self._many.wait():
            pause.wait(LOOK_EVERY)
            if self._returns:
                self.flush()

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        try:
            while unsent:
                unsent = unsent[os.write(self._replies, unsent) :]
        except OSError as error:
            raise Gone from error

    def _read(self) -> None:
        """Take what there is, at least something, into the inbox."""
        data = self._orders.read(READ)
        if not data:
            raise Gone
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
                raise Gone
            at += got
        return whole


def _cut(whole: memoryview, head_size: int) -> Order:
    head: list[Any] = _decode(whole[:head_size])
    return head, whole[head_size:]
