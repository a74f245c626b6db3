"""What nodes say to each other in a session: the ``data`` of a ``relayData``."""

import base64
import binascii

import msgspec

from shoal.protocols.tealenet.relay.envelope import BadRelayMessage

HANDSHAKE = b"\x01"  # what the first message of a handshake begins with
HANDSHAKE_MIN = 81  # bytes that it has: a key, another with its tag, and a tag
_HANDSHAKE_TEXT_MIN = 108  # characters of base64 for those


def bytes_of(data: object) -> bytes:
    """Return what the ``data`` of a ``relayData`` stands for, as Rust's nodes read it.

    That is base64 text; any other text is the bytes themselves, and so is a list of
    numbers, of which the lowest eight bits count.  Raises BadRelayMessage.
    """
    if isinstance(data, msgspec.Raw):
        try:
            data = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeError) as error:
            why = "relayData: data: no text"
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
    """Raise BadRelayMessage for ``data`` that no reader takes, or that kills some.

    Real peers read the first message of a handshake before they look how long it is.
    """
    if type(data) is str:
        if len(data) > _HANDSHAKE_TEXT_MIN or not data.startswith("A"):
            return
        packet = bytes_of(data)
        if packet[:1] == HANDSHAKE and len(packet) < HANDSHAKE_MIN:
            raise BadRelayMessage(
                "invalid_message",
                f"relayData: data: a handshake of {len(packet)} bytes, expected at "
                f"least {HANDSHAKE_MIN}",
            )
    elif not isinstance(data, msgspec.Raw):  # which is a long text
        bytes_of(data)
