"""What is around a relay message: an object of one key, the kind, and its payload.

Kinds are written flat, for real peers refuse any other form of them, and read flat or
below ``_0``.
"""

from typing import Any

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.nesting import has_more_values, is_deep
from shoal.protocols.session import Data

RAW_AT = 4096  # bytes from which the text in a message is not decoded
COUNTED_AT = 1 << 18  # characters from which the values of a message are counted
VALUES_MAX = 100_000  # values of a message that are read
SHOWN_MAX = 100  # characters of something unknown that are repeated to who sent it

_decoder = msgspec.json.Decoder()
_raw_decoder = msgspec.json.Decoder(dict[str, dict[str, msgspec.Raw]])
_encoder = msgspec.json.Encoder()


class BadRelayMessage(PeerError):
    """A message that is none; ``code`` is how a relay's error names what is wrong."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


def open_envelope(data: Data) -> tuple[str, dict[str, Any]]:
    """Return the kind and the payload of a message, without what wraps the payload.

    Raises BadRelayMessage, with the codes and mostly the words of real relays.
    """
    try:
        if len(data) > COUNTED_AT:
            _check_size(data)
        envelope = _decoder.decode(data) if len(data) < RAW_AT else _long(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRelayMessage(
            "invalid_json", "Could not decode relay message"
        ) from error
    if type(envelope) is not dict:
        raise BadRelayMessage("invalid_message", "Expected an object with one key")
    if len(envelope) != 1:
        # Real relays take the first key: which that is, readers may disagree on.
        what = f"Expected one kind, got {len(envelope)}" if envelope else "Empty"
        raise BadRelayMessage("invalid_message", f"{what} relay message")
    ((kind, payload),) = envelope.items()
    if type(payload) is dict and type(inner := payload.get("_0")) is dict:
        payload = inner
    if type(payload) is not dict:
        shown = kind[:SHOWN_MAX]
        raise BadRelayMessage("invalid_message", f"{shown}: expected an object")
    for value in payload.values():
        if type(value) is not str and is_deep(value):
            shown = kind[:SHOWN_MAX]
            raise BadRelayMessage("invalid_message", f"{shown}: nested too deeply")
    return kind, payload


def write(kind: str, payload: object) -> str:
    """Write a payload of a kind."""
    return _encoder.encode({kind: payload}).decode()


# Private parts, in the order in which they are called.


def _long(data: Data) -> Any:
    """Decode a message, but for a text under ``data``: that would be most of the work.

    It stays as it was written, though checked, and can be written as it is.
    """
    if isinstance(data, bytes):
        data = data.decode()  # what is not decoded is not checked to be text either
    try:
        envelope = _raw_decoder.decode(data)
    except msgspec.ValidationError:
        return _decoder.decode(data)  # it has another form, of which there is an error
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
    # A long message is one long text, or else an attack on whoever builds its values.
    text = data if isinstance(data, str) else data.decode()
    if has_more_values(text, VALUES_MAX):
        why = f"More than {VALUES_MAX} values in a message"
        raise BadRelayMessage("invalid_message", why)
