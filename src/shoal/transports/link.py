"""The port of all transports: a connection that carries messages or bytes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import Batch, Data
from shoal.transports.strangers import Strangers

T = TypeVar("T")

CLOSE_TIMEOUT = 2.0  # seconds to wait for the peer's half of the closing handshake
CONNECT_TIMEOUT = 10.0  # seconds
WRONG_CERTIFICATE = 1015  # close code for a failed TLS handshake (RFC 6455, 7.4.1)

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

    async def send(self, data: Data) -> None:
        """Write ``data``; returns once the transport has room again.

        Raises LinkClosed if the connection has ended.
        """

    async def close(self, code: int, text: str) -> None:
        """End the connection.  Safe to call twice."""


@runtime_checkable
class LimitingLink(Protocol):
    """A link whose peer is a stranger, with limits of its own, until it is admitted."""

    @property
    def is_stranger(self) -> bool:
        """Whether the peer connected, and was not admitted until now, or the end."""

    def admit(self) -> None:
        """Lift the limits of a stranger.  Safe to call twice."""

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Call, and charge a stranger the CPU time that it takes."""


@runtime_checkable
class BudgetedLink(LimitingLink, Protocol):
    """A link whose peer can be counted among different strangers."""

    def holding(self, size: int) -> AbstractContextManager[None]:
        """Count ``size`` received bytes, also during a block."""

    def share_budget(
        self, strangers: Strangers, message_max: int | None = None
    ) -> None:
        """Count the peer among ``strangers``, with another limit of a message.

        ``message_max`` is in bytes; None: as large as the wire allows.
        """


@runtime_checkable
class EncryptedLink(Protocol):
    """A link that may be encrypted by ``seam.encrypted_stream``."""

    binding: bytes
    """Unique to the stream, and the same at both ends; empty: it is not encrypted."""


@runtime_checkable
class JoiningLink(Protocol):
    """A link on which messages that are sent together may arrive as one.

    The session tells them apart.
    """

    joined_max: int
    """Bytes that are joined at most; 0: each message arrives for itself."""


@runtime_checkable
class FramingLink(Protocol):
    """A byte link that splits messages itself, as a framed session directs."""

    def attach(
        self, framed: FramedSession[object], on_messages: OnMessages | None = None
    ) -> None:
        """Split the stream into messages from now on; ``receive`` returns no pieces.

        While a caller waits in ``messages``, small messages go to ``on_messages`` at
        once and the caller goes on waiting: waking it costs more than most messages.
        """

    async def messages(self) -> Sequence[FramedMessage]:
        """Wait for messages; return all complete ones, in order.

        Raises PeerError for a message that the session refuses, after those before it
        were returned, and LinkClosed when the link has ended.
        """

    def try_send(self, data: Data) -> bool:
        """Write a message if that needs no waiting; return whether it was written."""

    async def write(self, part: bytes | memoryview) -> None:
        """Write a part of a large message, without a copy, as ``send`` does."""


OpenLink: TypeAlias = Callable[
    [str, Mapping[str, str], int],
    AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]],
]
"""Opens a connection: to a URL, with headers, for messages up to a size in bytes.

Gives the headers of the answer, too.  Raises LinkClosed.
"""
