"""Relay messages as JSON: an object with one key, the kind, and the payload below it.

Payloads are written flat, because real peers refuse any other form, and read flat or
below ``_0``.
"""

import base64
import binascii
from typing import Any

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.json_limits import has_more_values, is_too_deep
from shoal.protocols.seam.session import Data

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
