"""Finds JSON values within text."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.domain.json_limits import NESTING_MAX, is_too_deep

WASTED_MAX = 4 << 20  # characters that are parsed and turn out to be no JSON

OPENINGS = "{["

_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonFragment:
    """A JSON object or list in a text.

    ``text`` is its exact text; ``value`` is the decoded value, with integers as floats,
    because their digits are unlimited.
    """

    text: str
    value: Any  # any JSON value


def find_json(text: str, openings: str = OPENINGS) -> Iterator[JsonFragment]:
    """Yield the outermost JSON objects and lists of a text, in order.

    Values nested more deeply than ``NESTING_MAX`` are skipped, but not the values in
    them.  ``openings`` are the brackets that may begin a value.

    Raises ValueError if invalid JSON-like text would take too long to scan.
    """
    constants: list[str] = []  # NaN and Infinity, which JSON lacks
    decoder = json.JSONDecoder(parse_int=float, parse_constant=constants.append)
    opening = re.compile(f"[{re.escape(openings)}]")
    position = wasted = 0
    while (begin := opening.search(text, position)) is not None:
        start = begin.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            wasted += error.pos - start
        except RecursionError:
            wasted += len(text) - start  # where the parser stopped is unknown
        else:
            if not constants and not is_too_deep(value):
                yield JsonFragment(text[start:end], value)
                position = end
                continue
            wasted += end - start
        if wasted > WASTED_MAX:
            raise ValueError(
                "too much of the text begins like JSON and does not end like it, or is "
                f"nested more than {NESTING_MAX} deep"
            )
        constants.clear()
        position = start + 1


def to_json(value: object) -> str:
    """Return the JSON text of a value, without spaces."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return escape_surrogates(text)


def compact(text: str) -> str:
    """Return JSON text without spaces between tokens; the tokens are unchanged."""
    return escape_surrogates(_SPACE.sub(r"\1", text))


def escape_surrogates(text: str) -> str:
    """Return JSON text that can be encoded: lone surrogates are escaped."""
    return _LONE_SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
