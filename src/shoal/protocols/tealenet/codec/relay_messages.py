"""The relay messages between nodes and a relay: objects with one key, the kind.

Payloads are written flat, because real peers refuse any other form, and read flat or
below ``_0``.  Source: the TealeNet document, and what real relays, nodes and gateways
write and read; see ``docs/protocols/tealenet.md``.  Times are seconds since 2001-01-01
(UTC); keys and signatures are hexadecimal in lower case.
"""

import base64
import binascii
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.json_limits import has_more_values, is_too_deep
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.scalars import wire_name

MESSAGE_MAX = 16 << 20  # bytes of a message, as at real relays
REGISTRATION_MAX = 64 << 10  # bytes of a register: all that strangers may send at once
CAPABILITIES_MAX = 48 << 10  # bytes of the capabilities in it, of any node
CLOSE_REPLACED = "Replaced by newer session"  # reason for closing an older connection

_ENTRY_DEFAULTS = {"natType": "unknown", "endpoints": []}

_BY_RELAY = Unread("nodes are reached through the relay only")
Number: TypeAlias = int | float
"""A number that keeps its notation: some peers accept no fraction, not even ``.0``."""


class _RelayPayload(msgspec.Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """The base of all payloads: absent fields are omitted."""


# Between a node and the relay.


class RelayRegister(_RelayPayload, frozen=True):
    """Registers a node, and again after each change.

    ``signature`` signs the text of the id, so it is always the same.  ``capabilities``
    has the node's hardware and models, as it wrote them.
    """

    node_id: str
    public_key: str
    display_name: str
    capabilities: dict[str, Any]
    signature: str
    wg_public_key: str | None = None


class RelayRegisterAck(_RelayPayload, frozen=True):
    """The node is registered until ``ttl_seconds`` after its last message."""

    node_id: str
    registered_at: Annotated[
        float, Unread("the node's own clock counts from here; `ttlSeconds` follows")
    ]
    ttl_seconds: Number


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
    """A node, as the relay describes it."""

    node_id: str
    public_key: Annotated[str, Unread("the node's id is its key")]
    display_name: str
    capabilities: dict[str, Any]
    last_seen: Annotated[float, Unread("the sessions' own heartbeats decide liveness")]
    nat_type: Annotated[str, _BY_RELAY]
    endpoints: Annotated[list[Any], _BY_RELAY]
    wg_public_key: str | None = None


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


RAW_AT = 4096  # bytes of a message above which the text of ``data`` stays encoded
COUNTED_AT = 1 << 18  # characters of a message above which its values are counted
VALUES_MAX = 100_000  # values in a message
SHOWN_MAX = 100  # characters of unknown text in an error

_decoder = msgspec.json.Decoder()
_raw_decoder = msgspec.json.Decoder(dict[str, dict[str, msgspec.Raw]])
_encoder = msgspec.json.Encoder()


class BadRelayMessage(PeerError):
    """An invalid message; ``code`` is for the relay's error."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


def decode_envelope(data: Data) -> tuple[str, dict[str, Any]]:
    """Return the kind and the payload of a message, without the layer ``_0``.

    Raises BadRelayMessage, with the codes and mostly the texts of real relays.
    """
    try:
        if len(data) > COUNTED_AT:
            _check_size(data)
        envelope = _decoder.decode(data) if len(data) < RAW_AT else _decode_long(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRelayMessage(
            "invalid_json", "Could not decode relay message"
        ) from error
    if type(envelope) is not dict:
        raise BadRelayMessage("invalid_message", "Expected an object with one key")
    if len(envelope) != 1:
        # Real relays use the first key, but readers disagree about which is first.
        what = f"Expected one kind, got {len(envelope)}" if envelope else "Empty"
        raise BadRelayMessage("invalid_message", f"{what} relay message")
    ((kind, payload),) = envelope.items()
    if type(payload) is dict and type(inner := payload.get("_0")) is dict:
        payload = inner
    if type(payload) is not dict:
        shown = kind[:SHOWN_MAX]
        raise BadRelayMessage("invalid_message", f"{shown}: expected an object")
    for value in payload.values():
        if type(value) is not str and is_too_deep(value):
            shown = kind[:SHOWN_MAX]
            raise BadRelayMessage("invalid_message", f"{shown}: nested too deeply")
    return kind, payload


def encode_envelope(kind: str, payload: object) -> str:
    """Encode a payload of a kind."""
    return _encoder.encode({kind: payload}).decode()


HANDSHAKE = b"\x01"  # the first byte of a handshake's first message
HANDSHAKE_MIN = 81  # bytes of that message: type, key, key with its tag, and tag
_HANDSHAKE_TEXT_MIN = 108  # characters of their base64


def decode_data(data: object) -> bytes:
    """Decode the ``data`` of a ``relayData``, as Rust nodes do.

    It is base64 text.  Any other text, and a list of numbers, is the bytes themselves;
    of a number the lowest eight bits count.  Raises BadRelayMessage.
    """
    if isinstance(data, msgspec.Raw):
        try:
            data = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeError) as error:
            why = "relayData: data: expected text"
            raise BadRelayMessage("invalid_message", why) from error
    if isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            return data.encode(errors="replace")
    if isinstance(data, list) and all(type(each) is int for each in data):
        return bytes(each & 0xFF for each in data)
    raise BadRelayMessage("invalid_message", "relayData: data: expected base64 text")


def check_data(data: object) -> None:
    """Raise BadRelayMessage for ``data`` that peers refuse, or that crashes some.

    Real peers parse the first message of a handshake without checking its length.
    """
    if type(data) is str:
        if len(data) > _HANDSHAKE_TEXT_MIN or not data.startswith("A"):
            return
        packet = decode_data(data)
        if packet[:1] == HANDSHAKE and len(packet) < HANDSHAKE_MIN:
            raise BadRelayMessage(
                "invalid_message",
                f"relayData: data: a handshake of {len(packet)} bytes, expected at "
                f"least {HANDSHAKE_MIN}",
            )
    elif not isinstance(data, msgspec.Raw):  # Raw is a long text
        decode_data(data)


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


# Private parts, in the order in which they are called.


def _decode_long(data: Data) -> Any:
    """Decode a message except for a text under ``data``, which is most of the work.

    The text is validated and keeps its encoding, so that it can be forwarded as it is.
    """
    if isinstance(data, bytes):
        data = data.decode()  # the raw decoder does not validate UTF-8
    try:
        envelope = _raw_decoder.decode(data)
    except msgspec.ValidationError:
        return _decoder.decode(data)  # another form: the caller reports the error
    return {
        kind: {
            name: raw if name == "data" and _is_long_text(raw) else _decoder.decode(raw)
            for name, raw in payload.items()
        }
        for kind, payload in envelope.items()
    }


def _is_long_text(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return len(view) >= RAW_AT // 2 and view[0] == ord('"')


def _check_size(data: Data) -> None:
    # A long valid message is one long text; many values would exhaust memory.
    text = data if isinstance(data, str) else data.decode()
    if has_more_values(text, VALUES_MAX):
        why = f"More than {VALUES_MAX} values in a message"
        raise BadRelayMessage("invalid_message", why)


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
