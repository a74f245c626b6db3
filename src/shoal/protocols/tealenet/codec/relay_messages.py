"""The relay messages: what nodes and a relay send to each other.

Source: the TealeNet document, and what real relays, nodes and gateways write and read;
see ``docs/protocols/tealenet.md``.  Times are seconds since 2001-01-01 (UTC), and keys
and signatures hexadecimal in lower case.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.relay_envelope import (
    BadRelayMessage,
    decode_data,
    decode_envelope,
    encode_envelope,
)

MESSAGE_MAX = 16 << 20  # bytes of a message, as real relays have it

_ENTRY_DEFAULTS = {"natType": "unknown", "endpoints": []}
_WORDS = {"id": "ID", "gb": "GB", "ram": "RAM", "ip": "IP"}


Number: TypeAlias = int | float
"""A number that is written as it is: some readers take no fraction, not even ``.0``."""


def _wire_name(name: str) -> str:
    """Return what a field is called on the wire: ``node_id`` is ``nodeID``."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(each, each.capitalize()) for each in rest)


class _RelayPayload(msgspec.Struct, frozen=True, omit_defaults=True, rename=_wire_name):
    """How all of them are written: what is absent is left out."""


# Between a node and the relay.


class RelayRegister(_RelayPayload, frozen=True):
    """Makes a node known, and again whenever something changes.

    ``signature`` is of the id's text, so always the same.  ``capabilities`` has what
    the node is and runs, as it wrote it.  ``shoal`` answers a
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
    """Ours: ``proof`` is the signature of ``challenge_text``."""

    challenge: str
    proof: str


class RelayRegisterChallenge(_RelayPayload, frozen=True):
    """Ours: register again, with a proof; for nodes with ``shoal`` capabilities only.

    Any later registration on the same connection needs none.
    """

    challenge: str


class RelayRegisterAck(_RelayPayload, frozen=True):
    """The node is known for ``ttl_seconds`` after what is heard of it last.

    ``shoal`` names the coordinator that a relay of ours is a part of, to nodes that
    know what that is.
    """

    node_id: str
    registered_at: float
    ttl_seconds: Number
    shoal: "RelayHost | UnsetType" = UNSET


class RelayHost(_RelayPayload, frozen=True):
    """Ours: a coordinator's node, and its Noise key with the proof of it."""

    node_id: str
    noise: str
    noise_proof: str


class DiscoverFilter(_RelayPayload, frozen=True):
    """Which nodes are wanted: all of them that all of this holds of."""

    model_id: str | None = None
    min_ram_gb: Number | None = None
    min_tier: Number | None = None
    max_peers: Number | None = None


class Discover(_RelayPayload, frozen=True):
    """Asks who is there."""

    requesting_node_id: str
    filter: DiscoverFilter | None = None


class NodeEntry(_RelayPayload, frozen=True):
    """A node, as the relay knows it; ``shoal`` has what a relay of ours adds."""

    node_id: str
    public_key: str
    display_name: str
    capabilities: dict[str, Any]
    last_seen: float
    nat_type: str
    endpoints: list[Any]
    wg_public_key: str | None = None
    shoal: "KeyStatus | UnsetType" = UNSET


class KeyStatus(_RelayPayload, frozen=True):
    """Ours: whether a node has shown the relay that it has its key."""

    proven: bool


class DiscoverResponse(_RelayPayload, frozen=True):
    """Who is there.  Nodes that make no sense are left out when it is read."""

    peers: tuple[NodeEntry, ...]


class RelayPeerJoined(_RelayPayload, frozen=True):
    """Another node is there."""

    node_id: str
    display_name: str


class RelayPeerLeft(_RelayPayload, frozen=True):
    """Another node is no longer there."""

    node_id: str
    display_name: str


class RelayError(_RelayPayload, frozen=True):
    """What the relay did not do, and why."""

    code: str
    message: str
    retry_after_seconds: Number | None = None


# From node to node, through the relay.


class NatConnectionInfo(_RelayPayload, frozen=True):
    """Where a node might be reached without the relay."""

    public_ip: str
    public_port: Number
    nat_type: str
    local_ip: str | None = None
    local_port: Number | None = None
    wg_public_key: str | None = None


class RelayOffer(_RelayPayload, frozen=True):
    """Proposes to connect; ``signature`` is of ``FROM:TO:SESSION``."""

    from_node_id: str
    to_node_id: str
    session_id: str
    connection_info: NatConnectionInfo
    signature: str


class RelayAnswer(_RelayPayload, frozen=True):
    """Takes an offer up."""

    from_node_id: str
    to_node_id: str
    session_id: str
    connection_info: NatConnectionInfo
    signature: str


class CandidateAddress(_RelayPayload, frozen=True):
    """One more address to try."""

    ip: str
    port: Number
    type: str
    priority: Number


class IceCandidate(_RelayPayload, frozen=True):
    """Names one more address to try; no real peer does."""

    from_node_id: str
    to_node_id: str
    session_id: str
    candidate: CandidateAddress


class RelayOpen(_RelayPayload, frozen=True):
    """Opens a session, under an id that the opener makes up."""

    from_node_id: str
    to_node_id: str
    session_id: str


class RelayReady(_RelayPayload, frozen=True):
    """Says that a session may be used."""

    from_node_id: str
    to_node_id: str
    session_id: str


class RelayData(_RelayPayload, frozen=True):
    """What is said in a session: base64 on the wire."""

    from_node_id: str
    to_node_id: str
    session_id: str
    data: bytes


class RelayClose(_RelayPayload, frozen=True):
    """Ends a session."""

    from_node_id: str
    to_node_id: str
    session_id: str


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
    """Read a message; None if it is of a kind that is not known here.

    Raises BadRelayMessage.
    """
    if data[: len(_DATA_BEGINS)] == _DATA_BEGINS:
        # As relays write what nearly all messages are.
        try:
            return _data_decoder.decode(data).carried
        except (ValueError, RecursionError):
            pass  # another form, or the reason why not
    kind, payload = decode_envelope(data)
    if kind not in KINDS:
        return None
    return decode_payload(kind, payload)


def decode_payload(kind: str, payload: Mapping[str, Any]) -> RelayMessage:
    """Read the payload of a known kind.  Raises BadRelayMessage."""
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
    """Write a message as the text of a WebSocket message."""
    return encode_envelope(KIND_NAMES[type(message)], message)


def challenge_text(challenge: str, node_id: str) -> bytes:
    """Return what a node signs to show a relay of ours that it has its key now."""
    return f"shoal relay register 1:{challenge}:{node_id}".encode()


# Private parts, in the order in which they are called.


class _DataEnvelope(
    msgspec.Struct, rename={"carried": "relayData"}, forbid_unknown_fields=True
):
    carried: RelayData


_DATA_BEGINS = '{"relayData":'
_data_decoder = msgspec.json.Decoder(_DataEnvelope)


def _valid_entries(peers: object) -> list[NodeEntry]:
    if not isinstance(peers, list):
        raise BadRelayMessage("invalid_message", "discoverResponse: peers: no list")
    known = []
    for each in peers:
        if isinstance(each, dict):
            with suppress(msgspec.ValidationError):
                known.append(msgspec.convert(_ENTRY_DEFAULTS | each, NodeEntry))
    return known
