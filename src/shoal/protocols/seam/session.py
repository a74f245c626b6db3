"""The interface between worker protocols and the rest of the program.

A session is one connection to one peer, as a state machine: bytes and messages go in,
bytes and messages come out, and it never performs I/O, reads a clock or logs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event
from shoal.domain.worker import Hardware

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)

Data: TypeAlias = bytes | str  # a WebSocket text message is a str

Batch: TypeAlias = list[Data] | tuple[Data, ...]
"""The result of one read: messages, or pieces of a byte stream.

Not a Sequence, because a str is one too.
"""


class CloseCode(IntEnum):
    """WebSocket close codes that several wires use (RFC 6455, section 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    POLICY_VIOLATION = 1008
    INTERNAL_ERROR = 1011
    TRY_AGAIN_LATER = 1013  # IANA registry, RFC 6455, section 7.4
    MOVED = 3999  # Shoal's own: the worker reconnects elsewhere at once


class Send(msgspec.Struct):
    """Write data to the peer.

    Not frozen, because there is one per message.
    """

    data: Data


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection after earlier data is written; send nothing afterwards.

    A WebSocket peer gets ``code`` and ``text``; ``reason`` is for the log.
    """

    reason: str
    code: int = CloseCode.NORMAL
    text: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """An event to log; it has no other effect.  A ``routine`` one is no warning."""

    text: str
    routine: bool = False


@dataclass(frozen=True, slots=True)
class Bulk:
    """Write the parts of a large message in order, on a byte stream.

    Later output may be written before it, but between its parts only at an empty part.
    An iterator creates the parts as they are written; ``size`` is then their total size
    in bytes.  It may yield empty parts before the first, between steps of a long
    computation such as a checksum.

    Those with ``is_ready`` take turns, which an empty part ends.  One whose turn comes
    is passed over until it is ready; any call of the session may change that.
    """

    parts: tuple[bytes | memoryview, ...] | Iterator[bytes | memoryview]
    size: int | None = None
    is_ready: Callable[[], bool] | None = None


Output: TypeAlias = Send | Bulk | Close | Notice


def protocol_error(error: PeerError) -> Close:
    """Return the Close for a peer that violated the protocol."""
    return Close(f"protocol error: {error}", CloseCode.PROTOCOL_ERROR, str(error))


class Session(Protocol[In, Out]):
    """Speaks one protocol in one role.

    ``Session[Event, Command]`` is the coordinator's end and ``Session[Command, Event]``
    the worker's, which may also receive ``Admitted``.
    """

    @property
    def accepts(self) -> frozenset[type]:
        """The messages that ``send`` can encode; it may grow when a peer joins."""

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due, on the clock passed as ``now``."""

    def receive(self, batch: Batch, now: float) -> Sequence[In | Output]:
        """Process data that arrived together; return decoded messages and outputs.

        If the peer violates the protocol, a Close with the reason follows the messages
        before the violation; if there are none, it may raise PeerError.
        """

    def send(self, message: Out, now: float) -> Sequence[Output]:
        """Encode one message for the peer.

        Raises Unsupported if it is not among ``accepts``.
        """

    def tick(self, now: float) -> Sequence[In | Output]:
        """Run what is due at this time.

        Called once when the connection is open, and then at or after ``deadline``.
        """


@runtime_checkable
class HandlesConnectionLoss(Protocol):
    """A session that handles the loss of its connection."""

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Handle the end of input; the last call, unless the session closed.

        Called whenever a connection ends because of the peer: it disconnected, the
        connection broke, it stopped reading, or the link rejected its bytes.
        """


@runtime_checkable
class BoundSession(Protocol):
    """A session that authenticates its peer on an encrypted connection."""

    def bind(self, binding: bytes) -> None:
        """Record that the connection is encrypted; called before any other method.

        ``binding`` is unique to it, and the same at both ends: proofs cover it.
        """


@dataclass(frozen=True, slots=True)
class PeerProfile:
    """What a peer says about itself, for display: it is not verified.

    ``name`` is the one that its owner gave it, ``owner`` the id of the user that it
    belongs to, and ``organization`` that of a group; empty if it reports none.
    ``registered_at`` is the Unix time at which it first registered, in its own words.
    ``remark``: what an operator should know about its protocol's version.  ``release``
    is that of its program, if that is Shoal's.
    """

    name: str = ""
    hardware: Hardware | None = None
    owner: str = ""
    organization: str = ""
    protocol_version: int | None = None
    registered_at: float | None = None
    remark: str = ""
    release: str = ""


UNDESCRIBED = PeerProfile()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worker was admitted; for wires with one connection for all models.

    Comes once more with the ``peer`` that admitted it, if that describes itself.
    """

    peer: PeerProfile | None = None


CoordinatorEnd: TypeAlias = Session[Event, Command]
WorkerEnd: TypeAlias = Session[Command | Admitted, Event]
