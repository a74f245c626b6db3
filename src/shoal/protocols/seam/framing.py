"""Layers between a session and a byte stream: they have a session's own methods."""

import struct
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.session import (
    Batch,
    Close,
    Data,
    In,
    Out,
    Output,
    Send,
    Session,
    protocol_error,
)

T = TypeVar("T")
Heard = TypeVar("Heard", covariant=True)

LENGTH = struct.Struct(">I")
PREFIX_SIZE = LENGTH.size
COALESCE_BELOW = (
    4 << 10
)  # bytes: smaller pieces are put together, for each takes memory besides
COPY_BELOW = (
    64 << 10
)  # bytes of a message that is not copied to have its length before it

OTHER_PROTOCOLS = {
    b"HTTP": "an answer of HTTP",
    b"GET ": "a request of HTTP",
    b"POST": "a request of HTTP",
    b"HEAD": "a request of HTTP",
    b"\x16\x03": "TLS",  # RFC 8446, section 5.1
}
"""What else may come where a length is expected, by how it begins."""

_size_at = LENGTH.unpack_from


class FramedMessage(NamedTuple):
    """A message that was read into a buffer of its own; ``body`` comes after ``head``.

    The buffer is the reader's from now on.  ``checksum`` is the body's, where the link
    has had it computed while the body came: then it need not be gone through again.
    """

    head: bytes
    body: memoryview
    checksum: int | None = None


@runtime_checkable
class FramedSession(Protocol[Heard]):
    """A session on a byte stream whose messages a link can cut.

    Each body then is read straight into where it stays.  Where a link does not do that,
    ``receive`` is given pieces of the stream instead; a connection has only one of
    both.
    """

    head_size: int
    """Bytes that a message begins with, which tell how many follow."""

    def body_size(self, head: bytes) -> int:
        """Return how many bytes follow a head, before any of them is waited for.

        Raises PeerError if they are too many, or it is no head.  It is asked again once
        the messages before are taken, for they may allow more.
        """
        ...

    def buffer_for(
        self, head: bytes, allocate: Callable[[int], memoryview]
    ) -> memoryview | None:
        """Return where a large body is to be read to; None: to memory of its own.

        It is asked once of each such body, in order and before the messages before are
        taken.  ``take`` returns memory of so many bytes, whatever is in it.
        """
        ...

    def checksum(self, piece: memoryview, so_far: int) -> int:
        """Return the checksum of a body up to the end of a piece; it begins with 0.

        Large bodies go through it piece by piece as they come.
        """
        ...

    def on_open(self, certificate: bytes) -> None:
        """Take note of what protects the link, before anything else.

        ``certificate`` is the SHA-256 fingerprint of the server's; empty: no TLS.
        """
        ...

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Heard | Output]:
        """Take messages that arrived together, as ``Session.receive`` does."""
        ...


class LengthPrefixed(Generic[In, Out]):
    """Puts a big-endian 32-bit length before each message of the session inside.

    Reads may be of any size.  Memory is bounded by ``message_max`` bytes plus one read,
    and every byte is copied once, or twice where reads are small.
    """

    def __init__(self, inner: Session[In, Out], message_max: int) -> None:
        self._inner = inner
        self._message_max = message_max
        self._partial: list[bytes | bytearray] = []  # of a message, or of its length
        self._missing = 0  # bytes of it
        self._in_message = False
        self._closed = False
        self.accepts = inner.accepts

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._inner.deadline

    def set_message_max(self, message_max: int) -> None:
        """Take messages of so many bytes from now on."""
        self._message_max = message_max

    def receive(self, batch: Batch, now: float) -> Sequence[In | Output]:
        """Cut what arrived into messages and hand them on, all that are whole at once.

        A message that breaks the protocol raises PeerError, but if others came before
        it, what they meant is returned, and a Close with the reason.
        """
        if self._closed:
            return ()
        messages: list[Data] = []
        try:
            for data in batch:
                self._split(data, messages)
        except PeerError as error:
            if not messages:
                raise
            self._closed = True
            return [*self._receive_messages(messages, now), protocol_error(error)]
        return self._receive_messages(messages, now) if messages else ()

    def _receive_messages(self, messages: list[Data], now: float) -> list[In | Output]:
        return self._with_prefixes(self._inner.receive(messages, now))

    def send(self, message: Out, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        return self._with_prefixes(self._inner.send(message, now))

    def tick(self, now: float) -> Sequence[In | Output]:
        if self._closed:
            return ()
        return self._with_prefixes(self._inner.tick(now))

    def _split(self, data: Data, messages: list[Data]) -> None:
        if isinstance(data, str):
            raise PeerError("text message on a byte stream")
        at = 0
        if self._partial:
            at = self._missing
            if len(data) < at:
                self._buffer(data)
                return
            whole = b"".join((*self._partial, data[:at]))
            self._partial.clear()
            if self._in_message:
                messages.append(whole)
            else:
                data, at = whole + data[at:], 0
        end, limit = len(data), self._message_max
        while end - at >= PREFIX_SIZE:
            (size,) = _size_at(data, at)
            # Refuse before holding: the size is the peer's word, not a fact.
            if size > limit:
                raise _too_large(size, limit)
            begin = at + PREFIX_SIZE
            at = begin + size
            if at > end:
                self._in_message, self._missing = True, size
                self._buffer(data[begin:])
                return
            messages.append(data[begin:at])
        if at < end:
            self._in_message, self._missing = False, PREFIX_SIZE
            self._buffer(data[at:])

    def _buffer(self, piece: bytes) -> None:
        held = self._partial
        self._missing -= len(piece)
        if len(piece) >= COALESCE_BELOW:
            held.append(piece)
        elif held and isinstance(last := held[-1], bytearray):
            last += piece
        else:
            held.append(bytearray(piece))

    def _with_prefixes(self, outputs: Sequence[T | Output]) -> list[T | Output]:
        wrapped: list[T | Output] = []
        for output in outputs:
            if isinstance(output, Send):
                data = output.data
                assert isinstance(data, bytes), "text has no place on a byte stream"
                size = LENGTH.pack(len(data))
                if len(data) < COPY_BELOW:
                    wrapped.append(Send(size + data))
                else:
                    wrapped += (Send(size), output)
                continue
            if isinstance(output, Close):
                self._closed = True
            wrapped.append(output)
        return wrapped


def _too_large(size: int, limit: int) -> PeerError:
    """Return what is wrong with a message, and what is more likely with its port."""
    head = LENGTH.pack(size)
    for begin, other in OTHER_PROTOCOLS.items():
        if head.startswith(begin):
            return PeerError(f"{other} came, not a message: for that take another port")
    return LimitExceeded("message", size, limit)
