"""The seam between worker protocols and the rest of the program.

A session is one connection to one peer, as a state machine: bytes and messages go in,
bytes and messages come out, and it never performs I/O, reads a clock or logs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from shoal.domain.vocabulary import Command, Event
from shoal.domain.work import Feature

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)

Data: TypeAlias = bytes | str  # a WebSocket text message is a str


@dataclass(frozen=True, slots=True)
class Send:
    """Write this to the peer."""

    data: Data


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once what was sent before is written; send nothing after.

    ``code`` and ``text`` are what a WebSocket peer reads; ``reason`` is for us.
    """

    reason: str
    code: int = 1000
    text: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something odd that a person may want to read in the log; nothing else happens."""

    text: str


Output: TypeAlias = Send | Close | Notice


class Session(Protocol[In, Out]):
    """Speaks one protocol in one role.

    ``Session[Event, Command]`` is the coordinator's end, ``Session[Command, Event]``
    the worker's: what one end issues, the other receives.
    """

    accepts: frozenset[type]
    """The messages this wire can express; ``issue`` is given no other."""

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due, on the clock passed as ``now``."""
        ...

    def receive(self, data: Data, now: float) -> Sequence[In | Output]:
        """Take what arrived; return what it meant and what to answer.

        Raises PeerError if the peer broke the protocol.
        """
        ...

    def issue(self, message: Out, now: float) -> Sequence[Output]:
        """Encode one message for the peer.

        Raises Unsupported if it is not among ``accepts``.
        """
        ...

    def tick(self, now: float) -> Sequence[In | Output]:
        """Act on time passing.

        Called once when the connection is open, and then at or after ``deadline``.
        """
        ...


CoordinatorSession: TypeAlias = Session[Event, Command]
WorkerSession: TypeAlias = Session[Command, Event]


@dataclass(frozen=True, slots=True)
class Hello:
    """How a connection introduced itself.  Header names are lower case."""

    path: str
    query: str = ""  # as sent, without the question mark
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A session for a new connection, and the headers of the answer that opens it."""

    session: CoordinatorSession
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """A claim on WebSocket connections.  Of several claims the lowest ``rank`` wins."""

    rank: int
    claims: Callable[[Hello], bool]
    accept: Callable[[Hello, float], Accepted]
    """Takes the hello and the time; raises Refused with the wire's close code."""
    message_max: int  # bytes


Endpoint: TypeAlias = WebSocketRoute


@dataclass(frozen=True, slots=True)
class Member:
    """How a worker presents itself to a coordinator, for one model."""

    name: str
    model: str
    slots: int
    features: frozenset[Feature] = frozenset()
    token: str = ""


class Dialer(Protocol):
    """A worker's way into one coordinator, across all its connections to it.

    What a worker still runs when a connection breaks lives here, so that the next
    connection can go on with it.
    """

    url: str
    headers: Mapping[str, str]
    message_max: int  # bytes

    def connected(self, headers: Mapping[str, str]) -> WorkerSession:
        """Return the session for a new connection, given the headers of the answer."""
        ...

    def final(self, code: int, text: str) -> str | None:
        """Say why there is no point in dialling again after this close, or None."""
        ...
