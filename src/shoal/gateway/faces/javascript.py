"""Coerces JSON values as JavaScript does.

Source: ECMA-262, sections 7.1 (type conversion), 12.2 (white space), 19.2.4
(parseFloat), 19.2.5 (parseInt) and 25.5.1 (JSON.parse).
"""

import json
import math
import re
from decimal import Decimal
from typing import Any, NoReturn

from shoal.domain.json_limits import VALUES_MAX, has_more_values

# White space and line ends; Python's own set differs.
_SPACE = " \t\n\v\f\r\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# Not \d, which matches the digits of any script.
_DECIMAL = r"[+-]?(?:Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_FLOAT = re.compile(f"[{_SPACE}]*({_DECIMAL})")
_INT = re.compile(f"[{_SPACE}]*([+-]?)(?:0[xX]([0-9a-fA-F]+)|([0-9]+))")
_NUMBER = re.compile(f"[{_SPACE}]*({_DECIMAL})?[{_SPACE}]*")
_PREFIXED = re.compile(
    f"[{_SPACE}]*(0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+))[{_SPACE}]*"
)
_DIGITS_MAX = 15  # JavaScript's numbers are not exact beyond
_PREFIXED_MAX = 256  # digits with a prefix, from which a number is infinite


def parse_json(data: bytes) -> Any:
    """Parse JSON; bytes that are not UTF-8 become U+FFFD.

    Raises ValueError if it is not JSON, or has more than ``VALUES_MAX`` values.
    """
    text = data.decode("utf-8", "replace")
    if len(data) > VALUES_MAX and has_more_values(text, VALUES_MAX):
        raise ValueError(f"more than {VALUES_MAX} values")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_falsy(value: Any) -> bool:
    """Return whether a value counts as false: empty lists and objects do not."""
    return value is None or (not isinstance(value, (list, dict)) and not value)


def to_number(value: Any) -> float:
    """Return what ``Number`` makes of a value, or NaN."""
    if value is None or isinstance(value, bool):
        return float(bool(value))
    text = _text(value)
    if found := _NUMBER.fullmatch(text):
        return float(found[1]) if found[1] else 0.0
    if found := _PREFIXED.fullmatch(text):
        return float(int(found[1], 0)) if len(found[1]) < _PREFIXED_MAX else math.inf
    return math.nan


def parse_float(value: Any) -> float:
    """Return the number at the start of the value's text, or NaN."""
    found = _FLOAT.match(_text(value))
    return float(found[1]) if found else math.nan


def parse_int(value: Any, limit: int) -> int:
    """Return the integer at the start of the value's text, or 0.

    The result is at most ``limit``, and at least its negative.
    """
    found = _INT.match(_text(value))
    if found is None:
        return 0
    sign, hexadecimal, decimal = found.groups()
    if len(hexadecimal or decimal) > _DIGITS_MAX:
        size = limit
    else:
        size = min(int(hexadecimal, 16) if hexadecimal else int(decimal), limit)
    return -size if sign == "-" else size


def utf16_length(text: str) -> int:
    """Return the length of a text in UTF-16 units, as JavaScript counts."""
    return len(text) + sum(1 for char in text if char > "\uffff")


def _text(value: Any) -> str:
    """Return a value's text; of a list, nothing beyond the first comma."""
    end = ""
    while isinstance(value, list):
        if len(value) > 1:
            end = ","
        value = value[0] if value else ""
        if value is None:
            return end
    if isinstance(value, str):
        return value + end
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "no number"
    return _digits(value) + end


def _digits(value: float) -> str:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    # Only very large and very small numbers have an exponent in JavaScript.
    if number == 0 or 1e-6 <= abs(number) < 1e21:
        return format(Decimal(repr(number)), "f")
    return repr(number)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
