"""Canonical encodings of JSON, base64 and time.

Signed or hashed data must have the same bytes everywhere, and a verifiable file must
have exactly one encoding.

Sources: RFC 8785 (JSON Canonicalization Scheme), RFC 4648, section 4 (base64), and ISO
8601 as JavaScript's ``toISOString`` writes it.
"""

import binascii
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import NoneType
from typing import Any, Final

import msgspec
import rfc8785

from shoal.domain.work import JSON

_sorted: Final = msgspec.json.Encoder(order="sorted")
EXACT_MAX = 2**53 - 1  # integers beyond it have no canonical form
_PLAIN = frozenset({str, bool, NoneType})  # of these types, every value is plain
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z", re.ASCII
)


class _NotPlain(Exception):  # no error: it chooses the slower encoder
    """msgspec would write a value in another form than RFC 8785."""


def encode(value: JSON) -> bytes:
    """Encode a JSON value by RFC 8785.

    Raises ValueError for values without a canonical form: numbers beyond 2**53 or not
    finite, lone surrogates, and values that are not JSON.
    """
    # Most values msgspec writes as RFC 8785 demands, many times as fast.  It escapes as
    # RFC 8785 does.  It formats floats differently, keeps large integers, and sorts
    # names by code point instead of UTF-16 unit, which is the same for ASCII.
    left: list[Any] = [value]
    for each in left:  # no recursion: a call takes longer than most values
        kind = type(each)
        if kind is dict:
            for name in each:
                if not (type(name) is str and name.isascii()):
                    return _encode_other(value)
            left += each.values()
        elif kind is list or kind is tuple:
            left += each
        elif not (kind in _PLAIN or (kind is int and -EXACT_MAX <= each <= EXACT_MAX)):
            return _encode_other(value)
    return _sorted.encode(value)


def _encode_other(value: JSON) -> bytes:
    """Encode what is not plain."""
    try:
        plain = _plain(value)
    except _NotPlain:
        written: bytes = rfc8785.dumps(value)
        return written
    return _sorted.encode(plain)


def encode_any(value: JSON) -> bytes:
    """Encode any JSON value by RFC 8785: what has no canonical form is replaced.

    Integers beyond 2**53 become strings, numbers that are not finite null, and lone
    surrogates U+FFFD.
    """
    try:
        return encode(value)
    except ValueError:
        return encode(_replaced(value))


def _plain(value: Any) -> Any:
    """Return a plain value, in which floats are encoded already.

    Raises _NotPlain for what is neither plain nor a float, and ValueError.
    """
    kind = type(value)
    if kind is float:
        return msgspec.Raw(rfc8785.dumps(value))
    if kind is dict:
        plain: dict[str, Any] = {}
        for name, each in value.items():
            if not (type(name) is str and name.isascii()):
                raise _NotPlain
            plain[name] = each if type(each) in _PLAIN else _plain(each)
        return plain
    if kind is list or kind is tuple:
        return [*map(_plain, value)]
    if not (kind in _PLAIN or (kind is int and -EXACT_MAX <= value <= EXACT_MAX)):
        raise _NotPlain
    return value


def _replaced(value: JSON) -> JSON:
    match value:
        case str():
            return without_surrogates(value)
        case Mapping():
            return {
                without_surrogates(key): _replaced(each) for key, each in value.items()
            }
        case Sequence():
            return [_replaced(each) for each in value]
        case int() if abs(value) > EXACT_MAX:
            return str(value)
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def without_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD, so that the text can be encoded."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def to_base64(data: bytes) -> str:
    """Encode bytes in base64, padded and on one line."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def from_base64(text: str) -> bytes:
    """Decode the output of ``to_base64``; ValueError for any other encoding."""
    data = binascii.a2b_base64(text)
    # The decoder ignores excess bits and invalid characters.
    if to_base64(data) != text:
        raise ValueError("not in the one form of base64")
    return data


@lru_cache(16)  # all that is recorded at once has one time
def to_time(at: float) -> str:
    """Format Unix seconds as ISO 8601, in UTC, with milliseconds.

    Raises ValueError outside the years 1 to 9999.
    """
    try:
        # Not fromtimestamp: it truncates fractions of a second instead of rounding.
        moment = _EPOCH + timedelta(milliseconds=round(at * 1000))
    except OverflowError as error:
        raise ValueError(f"{at} is no time") from error
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def from_time(text: str) -> float:
    """Parse the output of ``to_time``; ValueError for anything else."""
    if _TIME.fullmatch(text) is None:
        raise ValueError(f"expected a time such as 2026-02-09T12:00:05.000Z: {text!r}")
    return (datetime.fromisoformat(text) - _EPOCH) / timedelta(seconds=1)
