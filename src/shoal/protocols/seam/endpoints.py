"""Ways to connect to peers: what a wire declares, and the program opens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.multi_peer import MultiPeerSession


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """How a connection introduced itself.  Header names are lower case."""

    path: str
    query: str = ""  # as sent, without the question mark
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""  # where it comes from, as the network has it


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """A session for a new connection, and the headers of the answer that opens it.

    A use of a join token that ``admitted`` stands for is to be stored before that.
    """

    session: MultiPeerSession
    headers: Mapping[str, str] = field(default_factory=dict)
    grant: AdmissionGrant = NO_JOIN_TOKEN


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """A claim on WebSocket connections.  Of several claims the lowest ``rank`` wins."""

    rank: int
    claims: Callable[[UpgradeRequest], bool]
    accept: Callable[[UpgradeRequest, float], AcceptedConnection]
    """Takes the hello and the time; raises Refused with the wire's close code."""
    message_max: int  # bytes


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """What a listener is announced as on the local network (RFC 6763, DNS-SD).

    ``kind`` is as in ``_http._tcp``, and ``text`` what its TXT record says.
    """

    kind: str
    name: str
    text: Mapping[str, str]


class ListenerTls(Enum):
    """Whether a listener speaks TLS, and who vouches for its certificate."""

    NONE = "tcp"
    COORDINATOR = "tls"  # the coordinator's; without one there is no such listener
    SELF_SIGNED = (
        "own tls"  # one that is made at each start, and that nobody vouches for
    )


class ConnectionGate(Protocol):
    """Whoever decides about connections before anything is read of them."""

    def delay(self, address: str, now: float) -> float | None:
        """Return for how many seconds to leave a connection unread; None: hang up."""
        ...

    def failed(self, address: str, now: float) -> None:
        """Take note of a connection that ended before it became one: no TLS."""
        ...


class NoGate:
    """Lets everybody in at once."""

    def delay(self, address: str, now: float) -> float | None:
        return 0.0

    def failed(self, address: str, now: float) -> None:
        pass


def _ignore_port(port: int) -> None:
    pass


def plain_label(label: str) -> str:
    """Return what a listener without TLS is told as."""
    return f"{label}:{ListenerTls.NONE.value}"


def bare_label(told: str) -> str:
    """Return the label in what a listener is told as."""
    return told.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port of its own.

    ``port`` is 0 where the system is to choose, and ``spare`` says that it may choose
    if the port is taken.  ``accept`` takes where a connection comes from, and the time.
    ``label`` tells a wire's listeners apart, and ``flag`` sets the port.
    ``handshake_within`` is how many seconds TLS may take to begin, and ``subject`` what
    a certificate of its own calls it.  ``bound`` is told which port it got, before
    anything is announced or anybody comes.
    """

    port: int
    accept: Callable[[str, float], MultiPeerSession]
    service: ServiceRecord | None = None
    security: ListenerTls = ListenerTls.NONE
    label: str = ""
    flag: str = ""
    falls_back: bool = False
    gate: ConnectionGate = NoGate()  # noqa: RUF009  # it has no state
    tls_timeout: float = 10.0
    subject: str = "localhost"
    on_bound: Callable[[int], None] = _ignore_port

    @property
    def advertised_label(self) -> str:
        """What it is told as to those who look for its port.

        Workers see by it whether TLS is spoken there.
        """
        if not self.label:
            return self.security.value
        is_plain = self.security is ListenerTls.NONE
        return plain_label(self.label) if is_plain else self.label


@dataclass(frozen=True, slots=True)
class OutgoingConnection:
    """A connection that we keep up: ``tcp://HOST:PORT``, ``tls://..``, or a WebSocket.

    ``open`` takes the time, once for each time that the connection is made.
    ``fingerprint`` is that of the certificate that the other end must have.
    """

    url: str
    new_session: Callable[[float], MultiPeerSession]
    headers: Mapping[str, str] = field(default_factory=dict)
    message_max: int = 16 << 20  # bytes
    fingerprint: bytes | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A connection that is made once, for a question and its answer.

    ``within`` is how many seconds it may take in all.  ``over`` takes why it ended, and
    the time; it is called once, also if the connection did not come about.
    """

    outgoing: OutgoingConnection
    timeout: float
    on_end: Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node that a wire keeps an eye on, for people to read.

    ``state`` is in the wire's own words, and ``since`` when it came about, if that is
    known.  ``rank`` is None for one that does not count for now, and ``weight`` is its
    share of the work.  ``name`` is empty where it is not known who is there, and
    ``remark`` says why.
    """

    name: str
    address: str
    state: str
    since: float | None
    score: float = 0.0
    rank: int | None = None
    weight: float = 0.0
    coordinator: bool = False
    note: str = ""


@runtime_checkable
class MembershipProber(Protocol):
    """Decides whom to call, as time passes: a state machine without I/O.

    An ``Exchange`` is made at once, beside others; an ``Outgoing`` is kept up until it
    is among those that ``unwanted`` returns.
    """

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; it may change with what sessions hear."""
        ...

    def tick(self, now: float) -> Sequence[Probe | OutgoingConnection]:
        """Return whom to call from now on."""
        ...

    def dropped(self) -> Sequence[OutgoingConnection]:
        """Return whom to call no more, of those that ``tick`` returned."""
        ...

    def nodes(self) -> Sequence[ListedNode]:
        """Return all nodes that it knows of, ourselves among them."""
        ...


@dataclass(frozen=True, slots=True)
class DiscoveredService:
    """A service that was found on the local network."""

    name: str
    addresses: tuple[str, ...]
    port: int
    text: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServiceBrowser:
    """A look for services of a kind.

    ``meet`` takes the time as well; it says how to connect, or None if that is not to
    be for now, as with one that is connected already.  ``shy`` is one that looks only
    where what we announce is found by others in their turn.
    """

    kind: str
    on_found: Callable[[DiscoveredService, float], OutgoingConnection | None]
    reciprocal: bool = False
