"""What nodes and a relay say to each other: one JSON object of one key, the kind.

Source: the TealeNet document, and what real relays, nodes and gateways write and read;
see ``docs/protocols/tealenet.md``.  Kinds are written flat, for real peers refuse any
other form of them, and read flat or below ``_0``.  Times are seconds since 2001-01-01
(UTC), and keys and signatures hexadecimal in lower case.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from shoal.protocols.session import Data
from shoal.protocols.tealenet.relay.data import bytes_of
from shoal.protocols.tealenet.relay.envelope import (
    BadRelayMessage,
    open_envelope,
    write,
)

MESSAGE_MAX = 16 << 20  # bytes of a message, as real relays have it

_NOT_TOLD = {"natType": "unknown", "endpoints": []}
_WORDS = {"id": "ID", "gb": "GB", "ram": "RAM", "ip": "IP"}


Number: TypeAlias = int | float
"""A number that is written as it is: some readers take no fraction, not even ``.0``."""


def _wire_name(name: str) -> str:
    """Return what a field is called on the wire: ``node_id`` is ``nodeID``."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(each, each.capitalize()) for each in rest)


class _Written(msgspec.Struct, frozen=True, omit_defaults=True, rename=_wire_name):
    """How all of them are written: what is absent is left out."""


# Between a node and the relay.


class Register(_Written, frozen=True):
    """Makes a node known, and again whenever something changes.

    ``signature`` is of the id's text, so always the same.  ``capabilities`` has what
    the node is and runs, as it wrote it.  ``shoal`` answers a ``RegisterChallenge``.
    """

    node_id: str
    public_key: str
    display_name: str
    capabilities: dict[str, Any]
    signature: str
    wg_public_key: str | None = None
    shoal: "Proof | UnsetType" = UNSET


class Proof(_Written, frozen=True):
    """Ours: ``proof`` is the signature of ``challenge_text`` for that challenge."""

    challenge: str
    proof: str


class RegisterChallenge(_Written, frozen=True):
    """Ours: register again, with a proof; for nodes with ``shoal`` capabilities only.

    Any later registration on the same connection needs none.
    """

    challenge: str


class RegisterAck(_Written, frozen=True):
    """The node is known for ``ttl_seconds`` after what is heard of it last.

    ``shoal`` names the coordinator that a relay of ours is a part of, to nodes that
    know what that is.
    """

    node_id: str
    registered_at: float
    ttl_seconds: Number
    shoal: "Host | UnsetType" = UNSET


class Host(_Written, frozen=True):
    """Ours: a coordinator's node, and its key for Noise as ``Introduction`` has it."""

    node_id: str
    noise: str
    noise_proof: str


class Filter(_Written, frozen=True):
    """Which nodes are wanted: all of them that all of this holds of."""

    model_id: str | None = None
    min_ram_gb: Number | None = None
    min_tier: Number | None = None
    max_peers: Number | None = None


class Discover(_Written, frozen=True):
    """Asks who is there."""

    requesting_node_id: str
    filter: Filter | None = None


class Known(_Written, frozen=True):
    """A node, as the relay knows it; ``shoal`` has what a relay of ours adds."""

    node_id: str
    public_key: str
    display_name: str
    capabilities: dict[str, Any]
    last_seen: float
    nat_type: str
    endpoints: list[Any]
    wg_public_key: str | None = None
    shoal: "Standing | UnsetType" = UNSET


class Standing(_Written, frozen=True):
    """Ours: whether a node has shown the relay that it has its key."""

    proven: bool


class DiscoverResponse(_Written, frozen=True):
    """Who is there.  Nodes that make no sense are left out when it is read."""

    peers: tuple[Known, ...]


class PeerJoined(_Written, frozen=True):
    """Another node is there."""

    node_id: str
    display_name: str


class PeerLeft(_Written, frozen=True):
    """Another node is no longer there."""

    node_id: str
    display_name: str


class Error(_Written, frozen=True):
    """What the relay did not do, and why."""

    code: str
    message: str
    retry_after_seconds: Number | None = None


# From node to node, through the relay.


class ConnectionInfo(_Written, frozen=True):
    """Where a node might be reached without the relay."""

    public_ip: str
    public_port: Number
    nat_type: str
    local_ip: str | None = None
    local_port: Number | None = None
    wg_public_key: str | None = None


class Offer(_Written, frozen=True):
    """Proposes to connect; ``signature`` is of ``FROM:TO:SESSION``."""

    from_node_id: str
    to_node_id: str
    session_id: str
    connection_info: ConnectionInfo
    signature: str


class Answer(_Written, frozen=True):
    """Takes an offer up."""

    from_node_id: str
    to_node_id: str
    session_id: str
    connection_info: ConnectionInfo
    signature: str


class Candidate(_Written, frozen=True):
    """One more address to try."""

    ip: str
    port: Number
    type: str
    priority: Number


class IceCandidate(_Written, frozen=True):
    """Names one more address to try; no real peer does."""

    from_node_id: str
    to_node_id: str
    session_id: str
    candidate: Candidate


class RelayOpen(_Written, frozen=True):
    """Opens a session, under an id that the opener makes up."""

    from_node_id: str
    to_node_id: str
    session_id: str


class RelayReady(_Written, frozen=True):
    """Says that a session may be used."""

    from_node_id: str
    to_node_id: str
    session_id: str


class RelayData(_Written, frozen=True):
    """What is said in a session: base64 on the wire."""

    from_node_id: str
    to_node_id: str
    session_id: str
    data: bytes


class RelayClose(_Written, frozen=True):
    """Ends a session."""

    from_node_id: str
    to_node_id: str
    session_id: str


RelayMessage: TypeAlias = (
    Register
    | RegisterChallenge
    | RegisterAck
    | Discover
    | DiscoverResponse
    | PeerJoined
    | PeerLeft
    | Error
    | Offer
    | Answer
    | IceCandidate
    | RelayOpen
    | RelayReady
    | RelayData
    | RelayClose
)

KINDS: Mapping[str, type[RelayMessage]] = {
    "register": Register,
    "registerChallenge": RegisterChallenge,
    "registerAck": RegisterAck,
    "discover": Discover,
    "discoverResponse": DiscoverResponse,
    "peerJoined": PeerJoined,
    "peerLeft": PeerLeft,
    "error": Error,
    "offer": Offer,
    "answer": Answer,
    "iceCandidate": IceCandidate,
    "relayOpen": RelayOpen,
    "relayReady": RelayReady,
    "relayData": RelayData,
    "relayClose": RelayClose,
}
NAMES: Mapping[type[RelayMessage], str] = {type_: name for name, type_ in KINDS.items()}


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
    kind, payload = open_envelope(data)
    if kind not in KINDS:
        return None
    return read(kind, payload)


def read(kind: str, payload: Mapping[str, Any]) -> RelayMessage:
    """Read the payload of a known kind.  Raises BadRelayMessage."""
    fields = dict(payload)
    if kind == "relayData":
        fields["data"] = bytes_of(fields.get("data"))
    elif kind == "discoverResponse":
        fields["peers"] = _sensible(fields.get("peers"))
    try:
        message: RelayMessage = msgspec.convert(fields, KINDS[kind])
    except msgspec.ValidationError as error:
        raise BadRelayMessage("invalid_message", f"{kind}: {error}") from error
    return message


def encode(message: RelayMessage) -> str:
    """Write a message as the text of a WebSocket message."""
    return write(NAMES[type(message)], message)


def challenge_text(challenge: str, node_id: str) -> bytes:
    """Return what a node signs to show a relay of ours that it has its key now."""
    return f"shoal relay register 1:{challenge}:{node_id}".encode()


# Private parts, in the order in which they are called.


class _Carried(
    msgspec.Struct, rename={"carried": "relayData"}, forbid_unknown_fields=True
):
    carried: RelayData


_DATA_BEGINS = '{"relayData":'
_data_decoder = msgspec.json.Decoder(_Carried)


def _sensible(peers: object) -> list[Known]:
    if not isinstance(peers, list):
        raise BadRelayMessage("invalid_message", "discoverResponse: peers: no list")
    known = []
    for each in peers:
        if isinstance(each, dict):
            with suppress(msgspec.ValidationError):
                known.append(msgspec.convert(_NOT_TOLD | each, Known))
    return known
