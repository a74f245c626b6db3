"""Connections to peers: their URLs, LAN sessions, and a worker's dialer.

On the local network a connection has one peer, and a length precedes each message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import SplitResult, parse_qsl, quote, urlencode

from shoal.domain.errors import ConfigError
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import DiscoveredService, OutgoingConnection
from shoal.protocols.seam.framing import LengthPrefixed
from shoal.protocols.seam.peer_addresses import split_url, without_query
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession, ToPeer
from shoal.protocols.seam.session import Batch, Bulk, Close, Notice, Output, Send
from shoal.protocols.seam.worker_session import MembershipState, WorkerSession
from shoal.protocols.tealenet.codec.envelope import PayloadForm
from shoal.protocols.tealenet.codec.messages import MODEL_MESSAGES
from shoal.protocols.tealenet.codec.relay_messages import CLOSE_REPLACED
from shoal.protocols.tealenet.codec.relay_messages import MESSAGE_MAX as RELAYED_MAX
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.local_node import TealeLocalNode, worker_node
from shoal.protocols.tealenet.peer import LAN, TealeConnection
from shoal.protocols.tealenet.peer_session import SENDABLE, FromPeer, TealePeerSession
from shoal.protocols.tealenet.relay_client.node import RelayNode

EXPECTED_FORMS = "expected tcp://HOST:PORT or wss://HOST/ws"
DIRECT_SCHEME = "tcp"
RELAY_SCHEMES: Mapping[str, str] = {
    "http": "ws",
    "https": "wss",
    "ws": "ws",
    "wss": "wss",
}
RELAY_PATH = "/ws"
NODE_PARAMETER = "node"  # the parameter of a relay's URL with the node's id


def peer_url(address: str) -> str:
    """Return the URL of a peer from HOST:PORT or a URL.

    Raises ConfigError if it cannot be dialled.
    """
    url = address if "://" in address else f"{DIRECT_SCHEME}://{address}"
    parts = _parse(url)
    if parts.scheme != DIRECT_SCHEME:
        raise ConfigError(f"peer {without_query(address)!a}: expected HOST:PORT")
    return f"{DIRECT_SCHEME}://{parts.netloc}"


def discovered_url(service: DiscoveredService) -> str | None:
    """Return the URL of a discovered peer; None if it has no address."""
    if not service.addresses:
        return None
    address = min(service.addresses, key=lambda each: ":" in each)  # IPv4 first
    if ":" in address:
        # The zone of an address begins with a percent sign (RFC 6874).
        address = f"[{address.replace('%', '%25')}]"
    return f"{DIRECT_SCHEME}://{address}:{service.port}"


def relay_url(url: str, node_id: str) -> str:
    """Return the URL at which to dial a relay, with the node's id in the query.

    Real relays ignore the id; proxies can route by it.  Raises ConfigError if the URL
    cannot be dialled.
    """
    parts = _parse(url)
    if parts.scheme not in RELAY_SCHEMES:
        raise ConfigError(f"relay {without_query(url)}: expected wss://HOST/ws")
    path = parts.path.rstrip("/")
    if parts.scheme.startswith("http") or not path:
        path += RELAY_PATH
    given = [pair for pair in parse_qsl(parts.query) if pair[0] != NODE_PARAMETER]
    query = urlencode(
        [*given, (NODE_PARAMETER, node_id)], quote_via=quote, errors="replace"
    )
    return f"{RELAY_SCHEMES[parts.scheme]}://{parts.netloc}{path}?{query}"


def _parse(url: str) -> SplitResult:
    schemes = (DIRECT_SCHEME, *RELAY_SCHEMES)
    return split_url(url, schemes, EXPECTED_FORMS, with_port=(DIRECT_SCHEME,))


PEER_NAME = "1"  # the only peer of a connection
HELLO_MAX = 64 << 10  # bytes of a message before admission: any host can dial


class SinglePeerSession:
    """Adapts a peer session to a multi-peer session with one peer."""

    def __init__(
        self, session: TealePeerSession, on_admitted: Callable[[], None] | None = None
    ) -> None:
        self._session = session
        self._on_admitted = on_admitted  # called once
        self.accepts = session.accepts

    @property
    def deadline(self) -> float | None:
        return self._session.deadline

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        messages = _as_peer_messages(self._session.receive(batch, now))
        if self._on_admitted is not None and self._session.admitted:
            self._on_admitted()
            self._on_admitted = None
        return messages

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        return self._session.send(message.message, now)

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        return _as_peer_messages(self._session.tick(now))


def lan_session(
    local: TealeLocalNode,
    connection: TealeConnection,
    device_connections: DeviceConnections,
    form: PayloadForm | None = None,
) -> PeerSession:
    """Return a session for a new connection."""
    peer_session = TealePeerSession(local, connection, LAN, device_connections, form)
    if connection.dialled:
        return LengthPrefixed(SinglePeerSession(peer_session), LAN.message_max)
    peer = SinglePeerSession(
        peer_session, lambda: session.set_message_max(LAN.message_max)
    )
    session = LengthPrefixed(peer, HELLO_MAX)
    return session


def dialled_connection(
    local: TealeLocalNode,
    url: str,
    device_connections: DeviceConnections,
    *,
    configured: bool = True,
) -> OutgoingConnection:
    """Return the connection to a peer; ``configured``: to an address of the settings.

    Its sessions share their form.
    """
    form = PayloadForm()
    connection = TealeConnection(dialled=True, configured=configured)

    def open_(now: float) -> PeerSession:
        return lan_session(local, connection, device_connections, form)

    return OutgoingConnection(url, open_, message_max=LAN.message_max)


def _as_peer_messages(
    outputs: Sequence[FromPeer | Output],
) -> list[PeerMessage | Output]:
    return [
        each
        if isinstance(each, Send | Bulk | Close | Notice)
        else PeerMessage(PEER_NAME, each)
        for each in outputs
    ]


DISPLACED = (
    "another connection registered this worker's id, which relays do not verify: "
    "another worker with the same --name, or a forged registration"
)


class TealeDialer:
    """Joins one peer or relay, and rejoins it.

    A peer with another passcode ends its attempts; being displaced at a relay does not,
    because anybody can do that.  Raises ConfigError from the constructor if the URL
    cannot be dialled.
    """

    message_max = RELAYED_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        self._membership = MembershipState(restriction=profile.restriction)
        self._local = replace(worker_node(profile), on_rejected=self._on_rejected)
        self._warning = ""  # for the next session at a relay
        self._on_relay = _parse(url).scheme != DIRECT_SCHEME
        if self._on_relay:
            assert profile.identity is not None, "a node's id is its key"
            self.url = relay_url(url, profile.identity.public_key.hex())
        else:
            connections = DeviceConnections(
                self._local.device_id, LAN.disconnected_after
            )
            self.url = peer_url(url)
            self._direct = dialled_connection(self._local, self.url, connections)

    def start_session(self, headers: Mapping[str, str]) -> WorkerSession:
        if not self._on_relay:
            accepts = SENDABLE | MODEL_MESSAGES
            return WorkerSession(self._direct.new_session, accepts, self._membership)
        return WorkerSession(
            self._relay_session, SENDABLE, self._membership, on_relay=True
        )

    def final_reason(self, code: int, text: str) -> str | None:
        if reason := self._membership.final_reason("--passcode"):
            return reason
        if text == CLOSE_REPLACED and self._on_relay:
            self._warning = DISPLACED
        self._membership.admitted = False  # until the next admission
        return None

    def _relay_session(self, now: float) -> PeerSession:
        warning, self._warning = self._warning, ""
        return RelayNode(self._local, now, warning=warning)

    def _on_rejected(self, reason: str) -> None:
        self._membership.refusal = reason


def dial_peer(url: str, profile: WorkerProfile) -> OutgoingConnection:
    """Return a connection to a peer on the local network that offers nothing.

    Raises ConfigError if the URL cannot be dialled.
    """
    local = replace(worker_node(profile), offers=())
    connections = DeviceConnections(local.device_id, LAN.disconnected_after)
    return dialled_connection(local, peer_url(url), connections)
