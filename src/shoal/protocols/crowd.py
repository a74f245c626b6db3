"""The seam for wires on which one connection stands for several workers, or peers.

A peer there may offer many models, and it may ask as well as serve; and a relay brings
many peers over one connection.  So both ends are alike, and everything that is said
goes from or to a peer of the connection.  What is not said here is as in ``session``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from shoal.domain.vocabulary import Command, Event
from shoal.protocols.session import Data, Hello, Pass, Session

EVERYBODY = ""
"""The peer that stands for all peers of a connection."""

BY_NO_TOKEN = Pass()


class Protection(Enum):
    """Who else can read what is said to a peer."""

    PLAIN = "plain"  # whoever carries it
    NOISE = "noise"
    TEALE = "teale"  # the encrypted channel of some wires' own peers
    TLS = "tls"


@dataclass(frozen=True, slots=True)
class Met:
    """A peer is there, and was let in.  The first that is heard of it.

    ``name`` is its identity, unique within its wire: of two peers with one name the
    newer takes the older's place.  ``cancels`` says whether it can be told to stop, and
    ``asks`` whether it may ask for work in its turn.
    """

    name: str
    cancels: bool = False
    asks: bool = False
    admitted: Pass = BY_NO_TOKEN
    protection: Protection = Protection.PLAIN


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer has left a connection that goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class From:
    """What a peer says.

    Its events are about what we asked of it, and its commands are what it asks of us:
    the jobs in them are numbered by the peer.
    """

    peer: str
    word: Met | Gone | Event | Command


@dataclass(slots=True)
class To:
    """What a peer is told, or EVERYBODY: ``Offered`` is what we can run ourselves.

    ``Dismiss`` ends what we have to do with the peer.  Not frozen, for there is one for
    each token.
    """

    peer: str
    word: Event | Command


CrowdSession: TypeAlias = Session[From, To]


@dataclass(frozen=True, slots=True)
class Service:
    """What a listener is announced as on the local network (RFC 6763, DNS-SD).

    ``kind`` is as in ``_http._tcp``, and ``text`` what its TXT record says.
    """

    kind: str
    name: str
    text: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port of its own.

    ``port`` is 0 where the system is to choose.  ``accept`` takes where a connection
    comes from, and the time.  ``secure``: with the coordinator's certificate, if there
    is one; without one there is no such listener.
    """

    port: int
    accept: Callable[[str, float], CrowdSession]
    service: Service | None = None
    secure: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A connection that we keep up: ``tcp://HOST:PORT``, ``tls://..``, or a WebSocket.

    ``open`` takes the time, once for each time that the connection is made.
    ``fingerprint`` is that of the certificate that the other end must have.
    """

    url: str
    open: Callable[[float], CrowdSession]
    headers: Mapping[str, str] = field(default_factory=dict)
    message_max: int = 16 << 20  # bytes
    fingerprint: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """A service that was found on the local network."""

    name: str
    addresses: tuple[str, ...]
    port: int
    text: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Browser:
    """A look for services of a kind.

    ``meet`` takes the time as well; it says how to connect, or None if that is not to
    be for now, as with one that is connected already.
    """

    kind: str
    meet: Callable[[Sighting, float], Outgoing | None]


class Switch(Protocol):
    """Carries messages between connections, none of which are to workers of ours.

    A state machine without I/O, like a session, but with many links: each is named by
    a number, and outputs say which link they are for.
    """

    def connected(
        self, link: int, hello: Hello, now: float
    ) -> Sequence["Carried | Spread"]:
        """Take note of a new link."""
        ...

    def receive(
        self, link: int, batch: Sequence[Data], now: float
    ) -> Sequence["Carried | Spread"]:
        """Take what arrived together on a link."""
        ...

    def pause(self, link: int, now: float) -> float:
        """Say for how many seconds nothing more is to be read from a link."""
        ...

    def gone(self, link: int, now: float) -> Sequence["Carried | Spread"]:
        """Take note that a link has ended, or is no longer written to."""
        ...

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        ...

    def tick(self, now: float) -> Sequence["Carried | Spread"]:
        """Act on time passing."""
        ...


@dataclass(slots=True)
class Carried:
    """Data for a link; or, with a ``close`` code, its end, for which ``data`` says why.

    Not frozen, for there is one for each message.
    """

    link: int
    data: Data
    close: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Messages for many links: each gets those from some place in them on.

    ``links`` has the links, and for each of them that place.
    """

    messages: tuple[Data, ...]
    links: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SwitchRoute:
    """A claim on WebSocket connections for a switch; see ``WebSocketRoute``.

    ``resident`` is how the coordinator itself takes part, over a link that never
    leaves the process; None: it does not.
    """

    rank: int
    claims: Callable[[Hello], bool]
    switch: Switch
    message_max: int  # bytes
    resident: Callable[[float], CrowdSession] | None = None
