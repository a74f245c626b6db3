"""Text on its way into JSON."""

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
