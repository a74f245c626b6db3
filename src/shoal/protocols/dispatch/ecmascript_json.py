"""JSON as JavaScript parses and serializes it: this wire hashes and signs that form.

Source: ECMAScript 2024, ``JSON.parse``, ``JSON.stringify``, ``Number::toString`` and
the order of an object's keys; the recorded cases confirm it for real peers.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from shoal.domain import json_limits
from shoal.domain.errors import PeerError
from shoal.domain.work import JSON

VALUES_MAX = 50_000  # values in one text: about 50 ms, whatever their length

INDEX_MAX = 2**32 - 2  # largest key that is an array index
EXACT_DIGITS = 15  # integers of up to 15 digits are exact as doubles
EXPONENT_FROM = 1e21  # numbers from here on are written with an exponent
POINT_FROM = 1e-6  # and so are numbers below this
REPR_POINT_FROM = 1e-4  # the same limit in Python

# Two adjacent surrogates cannot come from JSON, whose parser joins them to one
# character.  They mark numbers that must be written otherwise than Python does.
_MARK = "\ud800\udc00"
_MARKED = re.compile(f'"{_MARK}([^"]*)"')


class NotJson(PeerError):
    """A text that JavaScript does not parse."""


def canonical(text: str | bytes) -> bytes:
    """Return the result of ``JSON.stringify(JSON.parse(text))`` in UTF-8.

    Raises PeerError if it is not JSON, too large, or nested too deeply.
    """
    written = _write(_read(text, _decode_exactly))
    try:
        return written.encode()
    except UnicodeEncodeError:
        # JavaScript escapes lone surrogates, and "backslashreplace" does the same.
        return _MARKED.sub(r"\1", written).encode(errors="backslashreplace")


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text; lone surrogates stay in it.

    Raises PeerError as ``canonical`` does.
    """
    return _read(text, _decode)


def stringify(value: JSON) -> bytes:
    """Serialize a local value in the form of ``canonical``.

    Raises PeerError if it is too large or nested too deeply.
    """
    try:
        return canonical(_encode(value))
    except UnicodeEncodeError:  # lone surrogate
        return canonical(json.dumps(msgspec.to_builtins(value, enc_hook=dict)))
    except RecursionError as error:
        raise PeerError(_DEEP) from error


def to_json(value: object) -> str:
    """Serialize a local value or message as JSON; its texts become well formed."""
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:  # lone surrogate
        return well_formed(_write(msgspec.to_builtins(value, enc_hook=dict)))


def well_formed(text: str) -> str:
    """Return ``text`` with lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        code_units = text.encode("utf-16-le", "surrogatepass")
        return code_units.decode("utf-16-le", "replace")
    return text


def with_lone_surrogates_replaced(value: Any) -> Any:
    """Return a parsed value with lone surrogates replaced by U+FFFD."""
    return _decode(well_formed(_write(value)))


def to_string(value: object) -> str:
    """Return the result of ``String(value)`` in JavaScript, for a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return canonical(json.dumps(value)).decode()
        case list():
            parts = ("" if each is None else to_string(each) for each in value)
            return ",".join(parts)
        case _:
            return "[object Object]"


# Private parts, in the order in which they are called.

_DEEP = f"nested more deeply than {json_limits.NESTING_MAX} levels"


def _read(text: str | bytes, decode: Any) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode()
        elif not text.isascii():
            text.encode()  # raises for lone surrogates: only escapes may have them
        if json_limits.has_more_values(text, VALUES_MAX):
            raise PeerError(f"more than {VALUES_MAX} values")
        value = decode(text)
    except RecursionError as error:
        raise PeerError(_DEEP) from error
    except ValueError as error:
        raise NotJson("not JSON") from error
    if json_limits.may_be_too_deep(text) and json_limits.is_too_deep(value):
        raise PeerError(_DEEP)
    return value


def _integer(digits: str) -> JSON:
    return int(digits) if len(digits) <= EXACT_DIGITS else _number(digits)


def _number(digits: str) -> JSON:
    """Return a value that Python serializes as JavaScript does the number."""
    number = float(digits)
    size = abs(number)
    if math.isinf(number):
        return None
    if size < EXPONENT_FROM and number.is_integer():
        # JavaScript writes the shortest digits that identify it, then zeros.
        return int(Decimal(repr(number)))
    if size >= REPR_POINT_FROM:
        return number
    if size >= POINT_FROM:
        digits, _, places = repr(size).replace(".", "").partition("e-")
        sign = "-" if number < 0 else ""
        return f"{_MARK}{sign}0.{'0' * (int(places) - 1)}{digits}"
    return _MARK + repr(number).replace("e-0", "e-")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Order an object's keys as JavaScript does; of duplicate keys the last counts."""
    members = dict(pairs)
    indexes = [key for key in members if key.isdigit() and _is_index(key)]
    if not indexes:
        return members
    return {key: members[key] for key in sorted(indexes, key=int)} | members


def _is_index(key: str) -> bool:
    is_short_ascii = key.isascii() and len(key) <= len(str(INDEX_MAX))
    return is_short_ascii and (key == "0" or key[0] != "0") and int(key) <= INDEX_MAX


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which Python accepts


def _double(digits: str) -> JSON:
    if len(digits) <= EXACT_DIGITS and digits.lstrip("-").isdigit():
        return int(digits)
    number = float(digits)
    return None if math.isinf(number) else number


_decode_exactly = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_number,
    parse_constant=_refuse,
).decode
_decode = json.JSONDecoder(
    parse_int=_double, parse_float=_double, parse_constant=_refuse
).decode
_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode = msgspec.json.Encoder(enc_hook=dict).encode  # for mappings other than dict
