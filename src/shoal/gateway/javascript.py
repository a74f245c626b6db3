"""Coerces JSON values as JavaScript does.

Source: ECMA-262, sections 7.1 (type conversion), 19.2.4 (parseFloat), 19.2.5 (parseInt)
and 25.5.1 (JSON.parse).
"""

import json
import re
from decimal import Decimal
from typing import Any, NoReturn

# Not \d, which matches the digits of any script.
_FLOAT = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_INT = re.compile(r"\s*([+-]?[0-9]+)")
_DIGITS_MAX = 15  # JavaScript's numbers are not exact beyond


def parse_json(data: bytes) -> Any:
    """Parse JSON; bytes that are not UTF-8 become U+FFFD.

    Raises ValueError.
    """
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def leading_float(value: Any) -> float:
    """Return the number at the start of the value's text, or 0."""
    found = _FLOAT.match(_text(value))
    return float(found[1]) if found else 0.0


def leading_int(value: Any, limit: int) -> int:
    """Return the integer at the start of the value's text, or 0.

    The result is at most ``limit``, and at least its negative.
    """
    found = _INT.match(_text(value))
    if found is None:
        return 0
    digits = found[1]
    if len(digits) > _DIGITS_MAX:
        return -limit if digits.startswith("-") else limit
    return max(-limit, min(int(digits), limit))


def utf16_length(text: str) -> int:
    """Return the length of a text in UTF-16 units, as JavaScript counts."""
    return len(text) + sum(1 for char in text if char > "\uffff")


def _text(value: Any) -> str:
    while isinstance(value, list):
        # A list's text continues with a comma, which ends any number.
        value = value[0] if value else ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    try:
        number = float(value)
    except OverflowError:
        return ""  # "Infinity", as far as digits go
    # Only very large and very small numbers have an exponent in JavaScript.
    if number == 0 or 1e-6 <= abs(number) < 1e21:
        return format(Decimal(repr(number)), "f")
    return repr(number)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
