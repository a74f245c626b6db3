"""Ways to connect to peers: a wire declares them, and the program opens them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from shoal.domain.worker import Hardware
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.peer_session import PeerSession


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """The request that opens a WebSocket.  Header names are lower case."""

    path: str
    query: str = ""  # as sent, without the question mark
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""  # network address of the client


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """A session for a new connection, and the response headers.

    The use of the join token in ``grant`` must be stored before the response is sent.
    """

    session: PeerSession
    headers: Mapping[str, str] = field(default_factory=dict)
    grant: AdmissionGrant = NO_JOIN_TOKEN


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """A claim on WebSocket connections; of several, the lowest ``rank`` wins.

    ``encrypts``: a peer may encrypt its connection, beginning with
    ``encrypted_stream.PREFACE``.  ``service`` announces the HTTP port.
    """

    rank: int
    claims: Callable[[UpgradeRequest], bool]
    accept: Callable[[UpgradeRequest, float], AcceptedConnection]
    """Takes the request and the time; raises Refused with the wire's close code."""
    message_max: int  # bytes
    idle_max: float | None = None
    """Seconds without a message or a pong until a peer is lost; None: no pings."""
    encrypts: bool = False
    service: "ServiceRecord | None" = None


@dataclass(frozen=True, slots=True)
class BulkRoute:
    """A claim on WebSockets that carry bulk data which a session has offered.

    The query of the request is the name in the offer.
    """

    rank: int
    claims: Callable[[UpgradeRequest], bool]


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """The announcement of a listener on the local network (RFC 6763, DNS-SD).

    ``kind`` is a service type such as ``_http._tcp``, and ``text`` the TXT record.
    """

    kind: str
    name: str
    text: Mapping[str, str]


class ListenerTls(Enum):
    """Whether a listener uses TLS, and with which certificate."""

    NONE = "tcp"
    COORDINATOR = "tls"  # the coordinator's; without one, the listener is not opened
    SELF_SIGNED = "own tls"  # self-signed, and created at each start


class ConnectionGate(Protocol):
    """Accepts, delays or rejects connections before they are read."""

    def delay(self, address: str, now: float) -> float | None:
        """Return the delay in seconds before the first read; None: disconnect."""

    def failed(self, address: str, now: float) -> None:
        """Count a connection whose TLS handshake failed."""


class NoGate:
    """Accepts every connection without delay."""

    def delay(self, address: str, now: float) -> float | None:
        return 0.0

    def failed(self, address: str, now: float) -> None:
        pass


def _ignore_port(port: int) -> None:
    pass


def plain_label(label: str) -> str:
    """Return the advertised label of a listener without TLS."""
    return f"{label}:{ListenerTls.NONE.value}"


def bare_label(advertised: str) -> str:
    """Return the label within an advertised label."""
    return advertised.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Listener:
    """A separate TCP port.

    ``port`` 0 lets the system choose; with ``falls_back`` it also chooses if the port
    is taken.  ``accept`` takes the client's address and the time.  ``label``
    distinguishes a wire's listeners, and ``flag`` is the command-line flag that sets
    the port.  ``tls_timeout`` limits the TLS handshake in seconds, and ``subject`` is
    the subject of a self-signed certificate.  ``on_bound`` is called with the port
    before the listener is announced or accepts connections.
    """

    port: int
    accept: Callable[[str, float], PeerSession]
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
        """The label under which the coordinator advertises the port.

        It shows workers whether the listener uses TLS.
        """
        if not self.label:
            return self.security.value
        is_plain = self.security is ListenerTls.NONE
        return plain_label(self.label) if is_plain else self.label


@dataclass(frozen=True, slots=True)
class OutgoingConnection:
    """A connection to keep open: ``tcp://HOST:PORT``, ``tls://..``, or a WebSocket.

    ``new_session`` takes the time, and is called once per connection.  ``fingerprint``
    is that of the certificate that the server must present.  ``bulk_url`` is that of a
    ``BulkRoute`` of the other end, if it may have one.
    """

    url: str
    new_session: Callable[[float], PeerSession]
    headers: Mapping[str, str] = field(default_factory=dict)
    message_max: int = 16 << 20  # bytes
    fingerprint: bytes | None = None
    bulk_url: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A connection for one request and its response.

    ``timeout`` limits the whole exchange in seconds.  ``on_end`` takes the reason for
    the end and the time; it is called once, even if the connection failed.
    """

    outgoing: OutgoingConnection
    timeout: float
    on_end: Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node that a wire monitors, for status output.

    ``state`` is in the wire's own terms, and ``since`` is when it began, if known.
    ``rank`` is None for a node that is not ranked now, and ``weight`` is its share of
    the work.  ``name`` is empty if the node is unidentified; ``note`` says why.
    ``hardware`` is what the node reports, if anything; it has no tier.
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
    hardware: Hardware | None = None


@runtime_checkable
class MembershipProber(Protocol):
    """Decides which nodes to dial, and when: a state machine without I/O.

    A ``Probe`` starts at once and runs concurrently with others; an
    ``OutgoingConnection`` is kept open until ``dropped`` returns it.
    """

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due; sessions may change it."""

    def tick(self, now: float) -> Sequence[Probe | OutgoingConnection]:
        """Return new probes to run and connections to keep open."""

    def dropped(self) -> Sequence[OutgoingConnection]:
        """Return connections from ``tick`` that are no longer wanted."""

    def nodes(self) -> Sequence[ListedNode]:
        """Return all known nodes, including this one."""


TLS_KEY = "tls"  # in the record of a service over HTTP that has TLS
ZONE = "%25"  # prefix of an address's zone in URLs (RFC 6874)


@dataclass(frozen=True, slots=True)
class DiscoveredService:
    """A service discovered on the local network."""

    name: str
    addresses: tuple[str, ...]
    port: int
    text: Mapping[str, str]

    def url(self, scheme: str) -> str:
        """Return its URL at its first address; it must have one."""
        address = self.addresses[0]
        host = f"[{address.replace('%', ZONE)}]" if ":" in address else address
        return f"{scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServiceBrowser:
    """A search for services of a kind.

    ``on_found`` takes a service and the time, and returns how to connect, or None for
    not now, for example if the peer is already connected.  A ``reciprocal`` browser
    runs only if other nodes can find one of Shoal's own announcements.
    """

    kind: str
    on_found: Callable[[DiscoveredService, float], OutgoingConnection | None]
    reciprocal: bool = False
