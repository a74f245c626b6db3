"""Splits a byte stream into messages, each read straight into its final buffer.

Small messages are cut out of what one read returned.  A large one gets a buffer of its
size, which the next reads fill: none of it is copied, and its checksum is computed of
each read, while that is in the processor's cache.
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from weakref import finalize

from shoal.domain.errors import PeerError
from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.transports.loop_share import LARGE

READ_SIZE = 64 << 10  # bytes that are read at a time where small messages may come
LARGE_BODY = 64 << 10  # bytes of a body at which it has a buffer of its own
LARGE_READ_SIZE = 256 << 10  # bytes of a large body read at a time: what a cache holds
READ_AFTER_LARGE = 4 << 10  # bytes after a large body: of another, they are copied
UNTAKEN_MAX = 4 << 20  # bytes of messages that wait to be taken; then the peer has to
MAPPED_MIN = 2 << 20  # bytes from which on memory is mapped by the system
KEPT_MAX = 64 << 20  # bytes of unused buffers that are kept


class BufferPool:
    """Places for bodies; one loop takes them, and any thread may be the last to look.

    ``kept_max`` is how many bytes are kept for the next.
    """

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._kept: list[mmap.mmap] = []

    def allocate(self, size: int) -> memoryview:
        """Return uninitialized memory of ``size`` bytes.

        It takes up no more than is filled, and what was filled before.
        """
        if size < MAPPED_MIN:
            return memoryview(bytearray(size))
        place = self._kept_for(size) or _map(_rounded(size))
        # Each view of the memory holds this array: it is gone when they all are.
        held = (ctypes.c_ubyte * len(place)).from_buffer(place)
        finalize(held, self._back, place).atexit = False
        return memoryview(held).cast("B")[:size]

    def _kept_for(self, size: int) -> mmap.mmap | None:
        """Return a kept buffer that is large enough, if there is one."""
        kept = self._kept
        for index, place in enumerate(kept):
            if len(place) >= size:
                return kept.pop(index)
        return None

    def _back(self, place: mmap.mmap) -> None:
        """Keep a buffer; if the limit is exceeded, keep only this one.

        It removes nothing from the list: a finalizer may run at any point.
        """
        if sum(map(len, self._kept)) + len(place) <= self._kept_max:
            self._kept.append(place)
        elif len(place) <= self._kept_max:
            self._kept = [place]


def _rounded(size: int) -> int:
    """Round up to a power of two, so that few sizes serve all messages."""
    return 1 << (size - 1).bit_length()


def _map(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Private: Linux backs shared mappings by small pages only.
    place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        place.madvise(mmap.MADV_HUGEPAGE)  # filling it takes half the time
    return place


# Every read is over before another begins, on any link: one place does for all that
# are read in small pieces, and an idle link has none of its own.
READ_BUFFER = memoryview(bytearray(READ_SIZE))
_BRIEF = READ_BUFFER[:READ_AFTER_LARGE]
_BUFFERS = BufferPool()


class MessageSplitter:
    """The messages of one stream, from its bytes.

    A read puts bytes at ``room()``, and then says with ``filled`` how many they were;
    nothing else may come between the two.  Memory is bounded by the largest body that
    the session allows, ``UNTAKEN_MAX`` and two reads; a body that is announced and does
    not come takes address space, but no memory.
    """

    def __init__(self, framed: FramedSession[object]) -> None:
        self._framed = framed
        self._head_size = framed.head_size
        self._messages: list[FramedMessage] = []
        self._untaken_size = 0  # bytes of them
        self._held = bytearray()  # of a message that is not whole
        self._needed = self._head_size  # bytes that it has at least
        self._blocked = False  # held data is blocked until messages are taken
        self._after_large = False
        self._head = b""  # of the large message that is being read
        self._body: memoryview | None = None  # or its start, see ``buffer_for``
        self._body_size = 0  # bytes of the whole body
        self._body_filled = 0  # bytes of it that have arrived
        self._checksum = 0

    @property
    def full(self) -> bool:
        """Whether nothing more is to be read until messages have been taken."""
        return self._blocked or self._untaken_size > UNTAKEN_MAX

    @property
    def is_brief(self) -> bool:
        """Whether there are messages to be taken, which are not large together."""
        return 0 < self._untaken_size < LARGE

    def room(self) -> memoryview:
        """Return where the next bytes are to be put: at least one."""
        if self._body is not None:
            if self._body_filled >= len(self._body):  # the rest is dropped
                return READ_BUFFER[: self._body_size - self._body_filled]
            return self._body[self._body_filled : self._body_filled + LARGE_READ_SIZE]
        return _BRIEF if self._after_large else READ_BUFFER

    def filled(self, size: int) -> bool:
        """Record received bytes; return whether a message is complete."""
        if self._body is not None:
            self._fill(self.room()[:size])
        else:
            self._after_large = False
            self.feed(bytes(READ_BUFFER[:size]))
        return self._blocked or bool(self._messages)

    def feed(self, data: bytes) -> None:
        """Take bytes that were read elsewhere, of any number."""
        if self._body is not None:
            at = 0
            while self._body is not None and at < len(data):
                piece = self.room()[: len(data) - at]
                piece[:] = data[at : at + len(piece)]
                at += len(piece)
                self._fill(piece)
            data = data[at:]
        held = self._held
        if held or self._blocked:
            held += data
            if len(held) < self._needed or self._blocked:
                return
            data = bytes(held)
            held.clear()
        self._split(data)

    def take(self) -> Sequence[FramedMessage]:
        """Return all messages that are whole; the next are cut by what these allow.

        Raises PeerError for an invalid head, once the messages before it are taken.
        """
        if not self._messages and self._blocked:
            self._blocked = False
            data = bytes(self._held)
            self._held.clear()
            self._split(data)
            if not self._messages and self._blocked:
                self._framed.body_size(data[: self._head_size])
        messages, self._messages, self._untaken_size = self._messages, [], 0
        return messages

    def _split(self, data: bytes) -> None:
        """Cut small messages; begin a large one, or hold what is not whole."""
        head_size, view = self._head_size, memoryview(data)
        at, end = 0, len(data)
        while end - at >= head_size:
            begin = at + head_size
            head = data[at:begin]
            try:
                size = self._framed.body_size(head)
            except PeerError:
                # Earlier messages may change the limits.
                self._blocked = True
                break
            if size >= LARGE_BODY:
                self._begin(head, size)
                data = data[begin:]
                if data:
                    self.feed(data)
                return
            if end - begin < size:
                self._hold(data[at:], head_size + size)
                return
            at = begin + size
            self._messages.append(FramedMessage(head, view[begin:at]))
            self._untaken_size += head_size + size
        self._hold(data[at:], head_size)

    def _hold(self, data: bytes, needed: int) -> None:
        self._needed = needed
        self._held += data

    def _begin(self, head: bytes, size: int) -> None:
        self._head, self._body_size = head, size
        self._body_filled = self._checksum = 0
        self._body = self._framed.buffer_for(head, _BUFFERS.allocate)
        if self._body is None:
            self._body = _BUFFERS.allocate(size)
        assert 0 < len(self._body) <= size, "a buffer is not larger than the body"

    def _fill(self, piece: memoryview) -> None:
        assert self._body is not None, "this is a part of it"
        self._checksum = self._framed.checksum(piece, self._checksum)
        self._body_filled += len(piece)
        if self._body_filled == self._body_size:
            self._messages.append(FramedMessage(self._head, self._body, self._checksum))
            self._untaken_size += self._head_size + len(self._body)
            self._body = None
            self._after_large = True
