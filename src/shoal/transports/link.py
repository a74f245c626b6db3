"""The port of all transports: a connection that carries messages or bytes."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import Batch, Data

OnMessages: TypeAlias = Callable[[Sequence[FramedMessage]], None]
"""Takes messages; raises nothing."""


class LinkClosed(Exception):
    """The connection has ended; ``code`` and ``text`` are the peer's, if given."""

    def __init__(self, reason: str, code: int = 1006, text: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.text = text


class Link(Protocol):
    """An open connection that carries messages, or pieces of a byte stream."""

    peer: str
    """Who is at the other end, for the log."""

    async def receive(self) -> Batch:
        """Wait; return all that has arrived by then, in order, or a part of it.

        Raises LinkClosed once the link has ended.
        """
        ...

    async def send(self, data: Data) -> None:
        """Write ``data``; returns once the transport has room again.

        Raises LinkClosed if the connection has ended.
        """
        ...

    async def close(self, code: int, text: str) -> None:
        """End the connection.  Safe to call twice."""
        ...


@runtime_checkable
class FramingLink(Protocol):
    """A link of bytes that can cut messages itself, for a session that says how."""

    certificate: bytes
    """The SHA-256 fingerprint of the server's; empty: no TLS."""

    def attach(
        self, framed: FramedSession[object], on_messages: OnMessages | None = None
    ) -> None:
        """Cut messages from now on, and give out no pieces any more.

        While ``messages`` is waited for, those that come go to ``hear`` at once, and
        it goes on waiting: waking it takes longer than most messages do.
        """
        ...

    async def messages(self) -> Sequence[FramedMessage]:
        """Wait; return all messages that are whole by then, in order.

        Raises PeerError for one that the session refuses, once those before it have
        been returned, and LinkClosed once the link has ended.
        """
        ...

    def try_send(self, data: Data) -> bool:
        """Write a message as ``send`` does, if that needs no waiting; say whether."""
        ...

    async def write(self, part: bytes | memoryview) -> None:
        """Write a part of a large message, without a copy, as ``send`` does."""
        ...
