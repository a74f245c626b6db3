"""The relay messages between nodes and a relay.

Source: the TealeNet document, and what real relays, nodes and gateways write and read;
see ``docs/protocols/tealenet.md``.  Times are seconds since 2001-01-01 (UTC); keys and
signatures are hexadecimal in lower case.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.relay_envelope import (
    BadRelayMessage,
    decode_data,
    decode_envelope,
    encode_envelope,
)
from shoal.protocols.tealenet.codec.scalars import wire_name

MESSAGE_MAX = 16 << 20  # bytes of a message, as at real relays
REGISTRATION_MAX = 64 << 10  # bytes of a register: all that strangers may send at once
CAPABILITIES_MAX = 48 << 10  # bytes of the capabilities in it, of any node
CLOSE_REPLACED = "Replaced by newer session"  # reason for closing an older connection

_ENTRY_DEFAULTS = {"natType": "unknown", "endpoints": []}

_BY_RELAY = Unread("nodes are reached through the relay only")
_FOR_PEOPLE = Unread(
    "for people who look: a node authenticates each peer in its session, whatever the "
    "relay says"
)

Number: TypeAlias = int | float
"""A number that keeps its notation: some peers accept no fraction, not even ``.0``."""


class _RelayPayload(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """The base of all payloads: absent fields are omitted."""


# Between a node and the relay.


class RelayRegister(_RelayPayload, frozen=True):
    """Registers a node, and again after each change.

    ``signature`` signs the text of the id, so it is always the same.  ``capabilities``
    has the node's hardware and models, as it wrote them.  ``shoal`` answers a
    ``RelayRegisterChallenge``.
    """

    node_id: str
    public_key: str
    display_name: str
    capabilities: dict[str, Any]
    signature: str
    wg_public_key: str | None = None
    shoal: "RegistrationProof | UnsetType" = UNSET


class RegistrationProof(_RelayPayload, frozen=True):
    """Shoal's: ``proof`` is the signature of ``challenge_text``."""

    challenge: str
    proof: str


class RelayRegisterChallenge(_RelayPayload, frozen=True):
    """Shoal's: requests another registration, with a proof, from Shoal nodes.

    Later registrations on the same connection need no proof.
    """

    challenge: str


class RelayRegisterAck(_RelayPayload, frozen=True):
    """The node is registered until ``ttl_seconds`` after its last message.

    ``shoal`` tells Shoal nodes which coordinator a Shoal relay belongs to.
    """

    node_id: str
    registered_at: Annotated[
        float, Unread("the node's own clock counts from here; `ttlSeconds` follows")
    ]
    ttl_seconds: Number
    shoal: "RelayHost | UnsetType" = UNSET


class RelayHost(_RelayPayload, frozen=True):
    """Shoal's: a coordinator's node, and its signed Noise key."""

    node_id: str
    noise: str
    noise_proof: str


class DiscoverFilter(_RelayPayload, frozen=True):
    """Restricts discovery to the nodes that meet all conditions."""

    model_id: str | None = None
    min_ram_gb: Number | None = None
    min_tier: Number | None = None
    max_peers: Number | None = None


class Discover(_RelayPayload, frozen=True):
    """Requests the list of nodes."""

    requesting_node_id: Annotated[str, Unread("the connection names the node")]
    filter: DiscoverFilter | None = None


class NodeEntry(_RelayPayload, frozen=True):
    """A node, as the relay describes it; Shoal's relays add ``shoal``."""

    node_id: str
    public_key: Annotated[str, Unread("the node's id is its key")]
    display_name: str
    capabilities: dict[str, Any]
    last_seen: Annotated[float, Unread("the sessions' own heartbeats decide liveness")]
    nat_type: Annotated[str, _BY_RELAY]
    endpoints: Annotated[list[Any], _BY_RELAY]
    wg_public_key: str | None = None
    shoal: Annotated["KeyStatus | UnsetType", _FOR_PEOPLE] = UNSET


class KeyStatus(_RelayPayload, frozen=True):
    """Shoal's: whether a node has proved its key to the relay."""

    proven: Annotated[bool, _FOR_PEOPLE]


class DiscoverResponse(_RelayPayload, frozen=True):
    """The list of nodes; the decoder skips invalid entries."""

    peers: tuple[NodeEntry, ...]


class RelayPeerJoined(_RelayPayload, frozen=True):
    """Another node has registered."""

    node_id: str
    display_name: Annotated[
        str, Unread("the list of nodes, requested next, has the name")
    ]


class RelayPeerLeft(_RelayPayload, frozen=True):
    """Another node has left."""

    node_id: str
    display_name: Annotated[str, Unread("the node's id is enough to end its sessions")]


class RelayError(_RelayPayload, frozen=True):
    """The relay refuses a message."""

    code: str
    message: str
    retry_after_seconds: Annotated[
        Number | None,
        Unread(
            "a node asks again after 2 s at least, and a refused registration or "
            "question is repeated by schedule"
        ),
    ] = None


# Between two nodes, through the relay.


class _SessionPayload(_RelayPayload, frozen=True):
    """The base of the messages in a session, or about one."""

    from_node_id: str
    to_node_id: Annotated[str, Unread("the relay checks the receiver")]
    session_id: str


class NatConnectionInfo(_RelayPayload, frozen=True):
    """The addresses at which a node may be reachable without the relay."""

    public_ip: Annotated[str, _BY_RELAY]
    public_port: Annotated[Number, _BY_RELAY]
    nat_type: Annotated[str, _BY_RELAY]
    local_ip: Annotated[str | None, _BY_RELAY] = None
    local_port: Annotated[Number | None, _BY_RELAY] = None
    wg_public_key: Annotated[str | None, _BY_RELAY] = None


class RelayOffer(_SessionPayload, frozen=True):
    """Offers a direct connection; ``signature`` signs ``FROM:TO:SESSION``."""

    connection_info: Annotated[NatConnectionInfo, _BY_RELAY]
    signature: Annotated[
        str,
        Unread("the answer only refuses a direct connection, to the peer that asks"),
    ]


_NO_OFFERS = Unread("this end sends no offers")


class RelayAnswer(_SessionPayload, frozen=True):
    """Accepts an offer; this end sends none, and reads no answer."""

    connection_info: Annotated[NatConnectionInfo, _NO_OFFERS]
    signature: Annotated[str, _NO_OFFERS]


class CandidateAddress(_RelayPayload, frozen=True):
    """Another address at which a node may be reachable."""

    ip: Annotated[str, _BY_RELAY]
    port: Annotated[Number, _BY_RELAY]
    type: Annotated[str, _BY_RELAY]
    priority: Annotated[Number, _BY_RELAY]


class IceCandidate(_SessionPayload, frozen=True):
    """Adds an address to an offer; no real peer sends it, and this end ignores it."""

    candidate: Annotated[CandidateAddress, _BY_RELAY]


class RelayOpen(_SessionPayload, frozen=True):
    """Opens a session, under an id that the opener chooses."""


class RelayReady(_SessionPayload, frozen=True):
    """Accepts a session."""


class RelayData(_SessionPayload, frozen=True):
    """Data in a session: base64 on the wire."""

    data: bytes


class RelayClose(_SessionPayload, frozen=True):
    """Closes a session."""


RelayMessage: TypeAlias = (
    RelayRegister
    | RelayRegisterChallenge
    | RelayRegisterAck
    | Discover
    | DiscoverResponse
    | RelayPeerJoined
    | RelayPeerLeft
    | RelayError
    | RelayOffer
    | RelayAnswer
    | IceCandidate
    | RelayOpen
    | RelayReady
    | RelayData
    | RelayClose
)

KINDS: Mapping[str, type[RelayMessage]] = {
    "register": RelayRegister,
    "registerChallenge": RelayRegisterChallenge,
    "registerAck": RelayRegisterAck,
    "discover": Discover,
    "discoverResponse": DiscoverResponse,
    "peerJoined": RelayPeerJoined,
    "peerLeft": RelayPeerLeft,
    "error": RelayError,
    "offer": RelayOffer,
    "answer": RelayAnswer,
    "iceCandidate": IceCandidate,
    "relayOpen": RelayOpen,
    "relayReady": RelayReady,
    "relayData": RelayData,
    "relayClose": RelayClose,
}
KIND_NAMES: Mapping[type[RelayMessage], str] = {
    type_: name for name, type_ in KINDS.items()
}


def decode(data: Data) -> RelayMessage | None:
    """Decode a message; None for an unknown kind.

    Raises BadRelayMessage.
    """
    if data[: len(_DATA_PREFIX)] == _DATA_PREFIX:
        # Fast path: relays write relayData, nearly all messages, in this form.
        try:
            return _data_decoder.decode(data).carried
        except (ValueError, RecursionError):
            pass  # another form, or invalid: the slow path says why
    kind, payload = decode_envelope(data)
    if kind not in KINDS:
        return None
    return decode_payload(kind, payload)


def decode_payload(kind: str, payload: Mapping[str, Any]) -> RelayMessage:
    """Decode the payload of a known kind.  Raises BadRelayMessage."""
    fields = dict(payload)
    if kind == "relayData":
        fields["data"] = decode_data(fields.get("data"))
    elif kind == "discoverResponse":
        fields["peers"] = _valid_entries(fields.get("peers"))
    try:
        message: RelayMessage = msgspec.convert(fields, KINDS[kind])
    except msgspec.ValidationError as error:
        raise BadRelayMessage("invalid_message", f"{kind}: {error}") from error
    return message


def encode(message: RelayMessage) -> str:
    """Encode a message as the text of a WebSocket message."""
    return encode_envelope(KIND_NAMES[type(message)], message)


def challenge_text(challenge: str, node_id: str) -> bytes:
    """Return the text that a node signs to prove its key to a Shoal relay."""
    return f"shoal relay register 1:{challenge}:{node_id}".encode()


# Private parts, in the order in which they are called.


class _DataEnvelope(
    msgspec.Struct, rename={"carried": "relayData"}, forbid_unknown_fields=True
):
    """``relayData`` as a whole text: the fast path."""

    carried: RelayData


_DATA_PREFIX = '{"relayData":'
_data_decoder = msgspec.json.Decoder(_DataEnvelope)


def _valid_entries(peers: object) -> list[NodeEntry]:
    if not isinstance(peers, list):
        raise BadRelayMessage(
            "invalid_message", "discoverResponse: peers: expected a list"
        )
    entries = []
    for each in peers:
        if isinstance(each, dict):
            with suppress(msgspec.ValidationError):
                entries.append(msgspec.convert(_ENTRY_DEFAULTS | each, NodeEntry))
    return entries
