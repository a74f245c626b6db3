"""Reads JSON values that are not quite what JSON, or their field, allows.

Servers written in Python send NaN and Infinity, counts as floats, and texts that were
cut in the middle of a character.
"""

import json
import math
import re
from typing import Any

REPLACEMENT = "\ufffd"

HALF = re.compile("[\ud800-\udfff]")
"""Half of a character: of a pair, or (from U+DC80 to U+DCFF) a byte that is no UTF-8,
as Python's ``surrogateescape`` decodes it."""

IMPOSSIBLE = -9999.0  # a log probability of minus infinity, as with OpenAI

_BYTES = re.compile("[\udc80-\udcff]+")


def decode_json(data: bytes) -> Any:
    """Decode JSON; its texts may have halves of characters, and numbers be infinite.

    Raises ValueError.
    """
    try:
        text = data.decode("utf-8", "surrogateescape")
        return json.loads(text, strict=False, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def expressible(value: Any) -> Any:
    """Return a JSON value without infinite numbers and halves of characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return IMPOSSIBLE if value == -math.inf else None
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, list):
        return [expressible(each) for each in value]
    if isinstance(value, dict):
        return {without_halves(name): expressible(each) for name, each in value.items()}
    return value


def without_halves(text: str) -> str:
    """Return a text in which halves of characters that follow each other are joined.

    Others become U+FFFD.
    """
    if HALF.search(text) is None:
        return text
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return HALF.sub(REPLACEMENT, _BYTES.sub(_decoded, text))


def integer(value: Any) -> int | None:
    """Return an integer, also one that is written as another number or as a text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


def count(value: Any) -> int | None:
    """Return a count; a fraction, as of an average, is rounded."""
    if isinstance(value, float) and math.isfinite(value):
        return round(value)
    return integer(value)


def _decoded(found: re.Match[str]) -> str:
    return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python takes
        return math.inf
