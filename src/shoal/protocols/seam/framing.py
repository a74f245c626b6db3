"""Layers between a session and a byte stream, with the interface of a session."""

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
Received = TypeVar("Received", covariant=True)

LENGTH = struct.Struct(">I")
PREFIX_SIZE = LENGTH.size
# Bytes: smaller pieces are joined, because each has a memory overhead.
COALESCE_BELOW = 4 << 10
# Bytes: larger messages are not copied to prepend their length.
COPY_BELOW = 64 << 10

OTHER_PROTOCOLS = {
    b"HTTP": "an HTTP response",
    b"GET ": "an HTTP request",
    b"POST": "an HTTP request",
    b"HEAD": "an HTTP request",
    b"\x16\x03": "TLS",  # RFC 8446, section 5.1
}
"""What other protocols send where a length is expected, by prefix."""

_size_at = LENGTH.unpack_from


class FramedMessage(NamedTuple):
    """A message that was read into its own buffer; ``body`` comes after ``head``.

    It is the start of the body alone if the session had a smaller buffer for it.

    The receiver owns the buffer.  ``checksum`` is that of the body, if the link
    computed it while reading; then the receiver need not compute it again.
    """

    head: bytes
    body: memoryview
    checksum: int | None = None


@runtime_checkable
class FramedSession(Protocol[Received]):
    """A session on a byte stream that a link can split into messages.

    Such a link reads each body directly into its final buffer.  Any other link passes
    pieces of the stream to ``receive``; one connection never mixes the two.
    """

    head_size: int
    """Size in bytes of the head of a message, which has the size of its body."""

    def body_size(self, head: bytes) -> int:
        """Return the size of the body after a head; called before it is read.

        Raises PeerError if the size exceeds the limit or the head is invalid.  It is
        called again after earlier messages are processed, because they may raise the
        limit.
        """

    def buffer_for(
        self, head: bytes, allocate: Callable[[int], memoryview]
    ) -> memoryview | None:
        """Return the buffer for a large body; None: the link allocates one.

        If the buffer is smaller than the body, it receives the start, and the link
        reads past the rest, whose bytes count in the checksum only.

        Called once per large body, in order, and before earlier messages are processed.
        ``allocate`` returns uninitialized memory of that many bytes.
        """

    def checksum(self, piece: memoryview, so_far: int) -> int:
        """Return the checksum of a body up to the end of a piece; it starts at 0.

        Called piece by piece while a large body is read.
        """

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Received | Output]:
        """Process messages that arrived together, as ``Session.receive`` does."""


class LengthPrefixed(Generic[In, Out]):
    """Prefixes each message of the inner session with a big-endian 32-bit length.

    Reads may have any size.  Memory is bounded by ``message_max`` bytes plus one read.
    Each byte is copied once, or twice if reads are small.
    """

    def __init__(self, inner: Session[In, Out], message_max: int) -> None:
        self._inner = inner
        self._message_max = message_max
        # Pieces of an incomplete message or length.
        self._partial: list[bytes | bytearray] = []
        self._missing = 0  # bytes until it is complete
        self._in_message = False
        self._closed = False
        self.accepts = inner.accepts

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._inner.deadline

    def set_message_max(self, message_max: int) -> None:
        """Set the size limit of later messages, in bytes."""
        self._message_max = message_max

    def receive(self, batch: Batch, now: float) -> Sequence[In | Output]:
        """Split a batch into messages, and pass all complete ones on together.

        An invalid message raises PeerError; if valid messages precede it, returns their
        outputs and a Close with the reason instead.
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
            message = b"".join((*self._partial, data[:at]))
            self._partial.clear()
            if self._in_message:
                messages.append(message)
            else:
                data, at = message + data[at:], 0
        end, limit = len(data), self._message_max
        while end - at >= PREFIX_SIZE:
            (size,) = _size_at(data, at)
            # Check the size before buffering: the peer may claim any size.
            if size > limit:
                raise _too_large(size, limit)
            start = at + PREFIX_SIZE
            at = start + size
            if at > end:
                self._in_message, self._missing = True, size
                self._buffer(data[start:])
                return
            messages.append(data[start:at])
        if at < end:
            self._in_message, self._missing = False, PREFIX_SIZE
            self._buffer(data[at:])

    def _buffer(self, piece: bytes) -> None:
        pieces = self._partial
        self._missing -= len(piece)
        if len(piece) >= COALESCE_BELOW:
            pieces.append(piece)
        elif pieces and isinstance(last := pieces[-1], bytearray):
            last += piece
        else:
            pieces.append(bytearray(piece))

    def _with_prefixes(self, outputs: Sequence[T | Output]) -> list[T | Output]:
        prefixed: list[T | Output] = []
        for output in outputs:
            if isinstance(output, Send):
                data = output.data
                assert isinstance(data, bytes), "text message on a byte stream"
                size = LENGTH.pack(len(data))
                if len(data) < COPY_BELOW:
                    prefixed.append(Send(size + data))
                else:
                    prefixed += (Send(size), output)
                continue
            if isinstance(output, Close):
                self._closed = True
            prefixed.append(output)
        return prefixed


def _too_large(size: int, limit: int) -> PeerError:
    """Return the error for a size; names another protocol if the bytes match one."""
    head = LENGTH.pack(size)
    for start, other in OTHER_PROTOCOLS.items():
        if head.startswith(start):
            return PeerError(f"received {other} instead of a message: use another port")
    return LimitExceeded("message", size, limit)
