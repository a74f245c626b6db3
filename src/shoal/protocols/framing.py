"""Layers between a session and a byte stream: they have a session's own methods."""

import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.session import (
    Batch,
    Close,
    Data,
    In,
    Out,
    Output,
    Send,
    Session,
    broken,
)

T = TypeVar("T")

SIZE = struct.Struct(">I")


class LengthPrefixed(Generic[In, Out]):
    """Puts a big-endian 32-bit length before each message of the session inside.

    Reads may be of any size.  Memory is bounded by ``message_max`` bytes plus one read,
    and every byte is copied a fixed number of times.
    """

    def __init__(self, inner: Session[In, Out], message_max: int) -> None:
        self._inner = inner
        self._message_max = message_max
        self._held = bytearray()
        self._wanted = SIZE.size  # bytes to hold before there is anything to do
        self._closed = False
        self.accepts = inner.accepts

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._inner.deadline

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
                self._cut(data, messages)
        except PeerError as error:
            if not messages:
                raise
            self._closed = True
            return [*self._heard(messages, now), broken(error)]
        return self._heard(messages, now) if messages else ()

    def _heard(self, messages: list[Data], now: float) -> list[In | Output]:
        return [self._wrap(output) for output in self._inner.receive(messages, now)]

    def issue(self, message: Out, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        return [self._wrap(output) for output in self._inner.issue(message, now)]

    def tick(self, now: float) -> Sequence[In | Output]:
        if self._closed:
            return ()
        return [self._wrap(output) for output in self._inner.tick(now)]

    def _cut(self, data: Data, messages: list[Data]) -> None:
        if isinstance(data, str):
            raise PeerError("text message on a byte stream")
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return
            data = bytes(self._held)
            self._held.clear()
        at = 0
        while True:
            self._wanted = SIZE.size
            if len(data) - at < SIZE.size:
                break
            (size,) = SIZE.unpack_from(data, at)
            # Refuse before holding: the size is the peer's word, not a fact.
            if size > self._message_max:
                raise LimitExceeded("message", size, self._message_max)
            self._wanted += size
            if len(data) - at < self._wanted:
                break
            messages.append(data[at + SIZE.size : at + self._wanted])
            at += self._wanted
        self._held += data[at:]

    def _wrap(self, output: T) -> T | Send:
        if isinstance(output, Send):
            assert isinstance(output.data, bytes), "text has no place on a byte stream"
            return Send(SIZE.pack(len(output.data)) + output.data)
        if isinstance(output, Close):
            self._closed = True
        return output
