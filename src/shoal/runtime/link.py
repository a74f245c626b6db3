"""What the runtime needs from a connection."""

from typing import Protocol

from shoal.protocols.session import Batch, Data


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
