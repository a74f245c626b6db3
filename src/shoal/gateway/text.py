"""Text on its way into JSON."""

import json
import re

import msgspec

_HALF = re.compile("[\ud800-\udfff]")

_encode = msgspec.json.Encoder().encode


def well_formed(text: str) -> str:
    """Replace halves of characters, which UTF-8 cannot carry, by U+FFFD."""
    return _HALF.sub("\ufffd", text)


def encode_text(text: str) -> bytes:
    """Encode a JSON string as JavaScript does: raw UTF-8, controls escaped."""
    try:
        return _encode(text)
    except UnicodeEncodeError:
        return _encode(well_formed(text))


def encode_event_text(text: str) -> bytes:
    """Encode a JSON string for a line of a server-sent event."""
    return _one_line(encode_text(text), text.isascii())


def encode_json(value: object) -> bytes:
    """Encode any value for a line of a server-sent event, or for a body."""
    try:
        encoded = _encode(value)
    except UnicodeEncodeError:
        # Rare, and slow: some text in it was cut in the middle of a character.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        encoded = well_formed(text).encode()
    return _one_line(encoded, encoded.isascii())


def _one_line(encoded: bytes, ascii: bool) -> bytes:
    if not ascii:
        # Clients in Python that split lines with str.splitlines break here too.
        for char, escape in _LINE_ENDS:
            encoded = encoded.replace(char, escape)
    return encoded


_LINE_ENDS = tuple(
    (char.encode(), b"\\u%04x" % ord(char)) for char in ("\x85", "\u2028", "\u2029")
)
