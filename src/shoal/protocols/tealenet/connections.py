"""Connections to peers: their URLs, LAN sessions, and a worker's dialer.

On the local network a connection has one peer, and a length precedes each message.  A
worker reaches its coordinator directly, or through the coordinator's relay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import DiscoveredService, OutgoingConnection
from shoal.protocols.seam.framing import LengthPrefixed
from shoal.protocols.seam.peer_session import (
    PeerMessage,
    PeerSession,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Batch, Bulk, Close, Notice, Output, Send
from shoal.protocols.seam.worker_session import MembershipState, WorkerSession
from shoal.protocols.tealenet.codec.model_sharing import MODEL_MESSAGES
from shoal.protocols.tealenet.codec.relay_messages import CLOSE_REPLACED
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole, worker_node
from shoal.protocols.tealenet.membership.node_directory import PinnedKeys
from shoal.protocols.tealenet.membership.relay_node import RelayNode
from shoal.protocols.tealenet.payload_form import PayloadForm
from shoal.protocols.tealenet.peer import TealeConnection
from shoal.protocols.tealenet.peer_session import SENDABLE, FromPeer, TealePeerSession

EXPECTED_FORMS = "expected http://HOST:PORT, tcp://HOST:PORT or wss://HOST/ws"
DIRECT_SCHEMES: Mapping[str, Protection] = {
    "tcp": Protection.PLAIN,
    "tls": Protection.TLS,
    "noise": Protection.NOISE,
    "noise+tls": Protection.NOISE,
}
ENCRYPTED: Mapping[str, str] = {"tcp": "noise", "tls": "noise+tls"}
RELAY_SCHEMES: Mapping[str, str] = {
    "http": "ws",
    "https": "wss",
    "ws": "ws",
    "wss": "wss",
}
SHOAL_MARK = "shoal"  # in the announcement of a Shoal peer; real peers ignore it
RELAY_PATH = "/ws"
NODE_PARAMETER = "node"  # the parameter of a relay's URL with the node's id


def peer_url(address: str) -> str:
    """Return the URL of a peer from HOST:PORT or a URL.

    Raises ConfigError if it cannot be dialled.
    """
    url = address if "://" in address else f"tcp://{address}"
    if _parse(url).scheme not in DIRECT_SCHEMES:
        raise ConfigError(f"peer {without_query(address)!a}: expected HOST:PORT")
    return url


def discovered_url(service: DiscoveredService) -> str | None:
    """Return the URL of a discovered peer; None if it has no address.

    Shoal's can encrypt, and say in the announcement that they are Shoal's.
    """
    if not service.addresses:
        return None
    scheme = ENCRYPTED["tcp"] if SHOAL_MARK in service.text else "tcp"
    address = min(service.addresses, key=lambda each: ":" in each)  # IPv4 first
    if ":" in address:
        # The zone of an address begins with a percent sign (RFC 6874).
        address = f"[{address.replace('%', '%25')}]"
    return f"{scheme}://{address}:{service.port}"


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


def candidate_urls(url: str, profile: WorkerProfile) -> list[str]:
    """Return the URLs to try: the coordinator's direct one first, if it has one.

    Raises ConfigError if the URL cannot be dialled.
    """
    parts = _parse(url)
    if parts.scheme in DIRECT_SCHEMES:
        return [direct_url(url, profile)]
    assert profile.identity is not None, "a node's id is its key"
    relay = relay_url(url, profile.identity.public_key.hex())
    return [profile.direct_url, relay] if profile.direct_url else [relay]


def direct_url(url: str, profile: WorkerProfile) -> str:
    """Return the URL at which to dial a peer directly, encrypted unless ``plain``.

    Raises ConfigError if it cannot be dialled.
    """
    parts = _parse(url)
    scheme = parts.scheme
    if not profile.plain:
        scheme = ENCRYPTED.get(scheme, scheme)
    return f"{scheme}://{parts.netloc}"


def without_query(url: str) -> str:
    """Return a URL for messages, without the query, which may have secrets."""
    return url.partition("?")[0]


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port  # an invalid port raises ValueError
    except ValueError as error:
        raise ConfigError(
            f"URL {without_query(url)!a}: {error}; {EXPECTED_FORMS}"
        ) from error
    if parts.scheme not in DIRECT_SCHEMES and parts.scheme not in RELAY_SCHEMES:
        raise ConfigError(f"URL {without_query(url)!a}: {EXPECTED_FORMS}")
    if not host or (parts.scheme in DIRECT_SCHEMES and port is None):
        missing = "host" if not host else "port"
        raise ConfigError(f"URL {without_query(url)!a}: no {missing}; {EXPECTED_FORMS}")
    return parts


PEER_NAME = "1"  # the only peer of a connection
MESSAGE_MAX = LAN.worker_request_max  # bytes of the largest message
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

    def bind(self, binding: bytes) -> None:
        self._session.bind(binding)

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
    """Return a session for a new connection.

    A worker accepts larger messages, because they come from its coordinator.
    """
    peer_session = TealePeerSession(local, connection, LAN, device_connections, form)
    message_max = LAN.request_max(to_worker=local.role is TealeRole.WORKER)
    if connection.dialled:
        return LengthPrefixed(SinglePeerSession(peer_session), message_max)
    peer = SinglePeerSession(peer_session, lambda: session.set_message_max(message_max))
    session = LengthPrefixed(peer, HELLO_MAX)
    return session


def _as_peer_messages(
    outputs: Sequence[FromPeer | Output],
) -> list[PeerMessage | Output]:
    return [
        each
        if isinstance(each, Send | Bulk | Close | Notice)
        else PeerMessage(PEER_NAME, each)
        for each in outputs
    ]


SAME_KEY = "another worker joined with the same key: choose another --name"
DISPLACED = (
    "another connection registered this worker's id, which this relay does not verify: "
    "another worker with the same --name, or a forged registration"
)
CLOSE_RESTARTING = 1012  # close code "service restart" (IANA; RFC 6455, section 7.4)


class TealeDialer:
    """Joins one coordinator, and rejoins it, trying its URLs in turn.

    It tries the same URL again after it was admitted there, and while the coordinator
    restarts.  Only a coordinator that has proved its key ends its attempts: anybody can
    displace a worker at a relay that is not Shoal's.  Raises ConfigError from the
    constructor if the URL cannot be dialled.
    """

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        self._membership = MembershipState(restriction=profile.restriction)
        self._local = replace(worker_node(profile), on_rejected=self._on_rejected)
        self._urls = candidate_urls(url, profile)
        self._device_connections = DeviceConnections(
            self._local.device_id, LAN.disconnected_after
        )
        self._pinned_keys = PinnedKeys()
        self._form = PayloadForm()
        self._relay_node: RelayNode | None = None  # the last one
        self._warning = ""  # for the next one
        self.url = self._urls[0]

    def start_session(self, headers: Mapping[str, str]) -> WorkerSession:
        if urlsplit(self.url).scheme in DIRECT_SCHEMES:
            return WorkerSession(
                self._direct_session, SENDABLE | MODEL_MESSAGES, self._membership
            )
        return WorkerSession(
            self._relay_session, SENDABLE, self._membership, on_relay=True
        )

    def final_reason(self, code: int, text: str) -> str | None:
        if reason := self._membership.final_reason("--token or --passcode"):
            return reason
        if text == CLOSE_REPLACED and (node := self._relay_node) is not None:
            if node.is_host_proven:
                return SAME_KEY
            self._warning = DISPLACED
        if not self._membership.admitted and code != CLOSE_RESTARTING:
            following = self._urls.index(self.url) + 1
            self.url = self._urls[following % len(self._urls)]
        self._membership.admitted = False  # until the next admission
        return None

    def _direct_session(self, now: float) -> PeerSession:
        return dialled_session(
            self._local, self.url, self._device_connections, self._form
        )

    def _relay_session(self, now: float) -> PeerSession:
        warning, self._warning = self._warning, ""
        node = RelayNode(self._local, now, self._pinned_keys, warning=warning)
        self._relay_node = node
        return node

    def _on_rejected(self, reason: str) -> None:
        self._membership.refusal = reason


def dial_peer(url: str, profile: WorkerProfile) -> OutgoingConnection:
    """Return a connection to a peer on the local network that submits jobs only.

    Raises ConfigError if the URL cannot be dialled.
    """
    url = direct_url(peer_url(url), profile)
    # A worker would replace another worker with the same name.
    local = replace(worker_node(profile), role=TealeRole.COORDINATOR, offers=())
    connections = DeviceConnections(local.device_id, LAN.disconnected_after)
    form = PayloadForm()
    return OutgoingConnection(
        url,
        lambda now: dialled_session(local, url, connections, form),
        message_max=MESSAGE_MAX,
    )


def dialled_session(
    local: TealeLocalNode,
    url: str,
    device_connections: DeviceConnections,
    form: PayloadForm,
    *,
    configured: bool = True,
) -> PeerSession:
    """Return a session with a dialled peer.

    ``form`` is that of all sessions at the address.  ``configured``: the address comes
    from the configuration.
    """
    protection = DIRECT_SCHEMES[urlsplit(url).scheme]
    return lan_session(
        local,
        TealeConnection(True, configured, protection=protection),
        device_connections,
        form,
    )
