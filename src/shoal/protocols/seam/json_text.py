"""Texts and JSON that UTF-8 can encode: half of a surrogate pair may come from JSON."""

import re
from typing import Any

import msgspec
from msgspec import Raw

from shoal.domain.errors import PeerError

_LONE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """Return ``text`` with U+FFFD for each character that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", text)
    return text


def encode_json(value: object) -> bytes:
    """Encode a value or a message as JSON, with well-formed texts.

    Raises PeerError if it is nested too deeply: peers refuse that.
    """
    try:
        try:
            return _encode(value)
        except UnicodeEncodeError:  # half of a surrogate pair
            return _encode(
                _well_formed_tree(msgspec.to_builtins(value, enc_hook=_to_builtin))
            )
    except RecursionError as error:
        raise PeerError("nested too deeply to be sent") from error


def _to_builtin(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, Raw) else dict(value)


def _well_formed_tree(value: Any) -> Any:
    match value:
        case str():
            return well_formed(value)
        case dict():
            return {
                _well_formed_tree(name): _well_formed_tree(inner)
                for name, inner in value.items()
            }
        case list() | tuple():
            return [_well_formed_tree(inner) for inner in value]
        case _:
            return value


# The hook encodes mappings that are not dicts.
_encode = msgspec.json.Encoder(enc_hook=dict).encode
