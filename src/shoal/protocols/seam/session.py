"""The seam between worker protocols and the rest of the program.

A session is one connection to one peer, as a state machine: bytes and messages go in,
bytes and messages come out, and it never performs I/O, reads a clock or logs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.vocabulary import Command, Event
from shoal.domain.work import Call, CallStream, JsonWork, Work

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)

Data: TypeAlias = bytes | str  # a WebSocket text message is a str

Batch: TypeAlias = list[Data] | tuple[Data, ...]
"""What one read brought: messages, or pieces of a byte stream.

No Sequence, which a single text would be as well.
"""


class CloseCode(IntEnum):
    """WebSocket close codes that several wires use (RFC 6455, section 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    POLICY_VIOLATION = 1008
    INTERNAL_ERROR = 1011
    MOVED = 3999  # Shoal's own: the worker reconnects elsewhere, at once


@dataclass(slots=True)
class Send:
    """Write this to the peer.

    Not frozen, for there is one for each message.
    """

    data: Data


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once what was sent before is written; send nothing after.

    ``code`` and ``text`` are what a WebSocket peer reads; ``reason`` is for us.
    """

    reason: str
    code: int = CloseCode.NORMAL
    text: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something odd that a person may want to read in the log; nothing else happens."""

    text: str


@dataclass(frozen=True, slots=True)
class Bulk:
    """Write these one after the other: a message that is large, on a byte stream.

    What is sent after it may go out before it, but between its parts only where one is
    empty.  An iterator makes the parts as they are written; then ``size`` says how many
    bytes they are together.  It may yield empty ones before the first, between steps
    of what takes long, such as a checksum.
    """

    parts: tuple[bytes | memoryview, ...] | Iterator[bytes | memoryview]
    size: int | None = None


Output: TypeAlias = Send | Bulk | Close | Notice


def protocol_error(error: PeerError) -> Close:
    """Return how to end a connection whose peer broke the protocol."""
    return Close(f"protocol error: {error}", CloseCode.PROTOCOL_ERROR, str(error))


def without_calls(work: Work) -> JsonWork:
    """Return work as it is, for a wire that calls no functions.

    Raises Unsupported if it is a call of one.
    """
    if isinstance(work, Call | CallStream):
        raise Unsupported("this wire calls no functions")
    return work


class Session(Protocol[In, Out]):
    """Speaks one protocol in one role.

    ``Session[Event, Command]`` is the coordinator's end, ``Session[Command, Event]``
    the worker's: what one end issues, the other receives, and ``Welcome`` besides.
    """

    @property
    def accepts(self) -> frozenset[type]:
        """The messages that ``send`` can encode; it may grow when a peer joins."""
        ...

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due, on the clock passed as ``now``."""
        ...

    def receive(self, batch: Batch, now: float) -> Sequence[In | Output]:
        """Take what arrived together; return what it meant and what to answer.

        If the peer breaks the protocol, a Close with the reason comes after what
        it had said before; with nothing before it, PeerError may be raised.
        """
        ...

    def send(self, message: Out, now: float) -> Sequence[Output]:
        """Encode one message for the peer.

        Raises Unsupported if it is not among ``accepts``.
        """
        ...

    def tick(self, now: float) -> Sequence[In | Output]:
        """Act on time passing.

        Called once when the connection is open, and then at or after ``deadline``.
        """
        ...


@runtime_checkable
class HandlesConnectionLoss(Protocol):
    """A session that has to know that its peer has hung up, and may still answer."""

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Take note that nothing more will come; the last call, unless it closed.

        It is also told of a connection that broke, of a peer that stopped reading, and
        of bytes that its link refused: that a connection ends because of the peer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker was let in; wires with one connection for all models say so."""


CoordinatorEnd: TypeAlias = Session[Event, Command]
WorkerEnd: TypeAlias = Session[Command | Admitted, Event]
