"""Finds the JSON that stands in a text among other words."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.domain.json_limits import NESTING_MAX, is_too_deep

WASTED_MAX = 4 << 20  # characters that are read as JSON and turn out to be none

OPENINGS = "{["

_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonFragment:
    """An object or a list.

    ``text`` is what stands there, exactly; ``value`` is what it means, but that whole
    numbers are floats: there is no limit to their digits.
    """

    text: str
    value: Any  # as JSON is


def find_json(text: str, openings: str = OPENINGS) -> Iterator[JsonFragment]:
    """Yield the JSON objects and lists in a text, in order, the outermost of each.

    What is nested more deeply than ``NESTING_MAX`` does not count, but what is in it
    may.  ``openings`` says with which brackets a value may begin.

    Raises ValueError if so much looks like JSON and is none that it would take too
    long.
    """
    constants: list[str] = []  # NaN and Infinity, which are no JSON
    decoder = json.JSONDecoder(parse_int=float, parse_constant=constants.append)
    opening = re.compile(f"[{re.escape(openings)}]")
    position = vain = 0
    while (begin := opening.search(text, position)) is not None:
        start = begin.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            vain += error.pos - start
        except RecursionError:
            vain += len(text) - start  # how far it read is not told
        else:
            if not constants and not is_too_deep(value):
                yield JsonFragment(text[start:end], value)
                position = end
                continue
            vain += end - start
        if vain > WASTED_MAX:
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
    """Return JSON text without spaces between its parts; the parts stay as they are."""
    return escape_surrogates(_SPACE.sub(r"\1", text))


def escape_surrogates(text: str) -> str:
    """Return JSON text in a form that can be encoded: lone surrogates are escaped."""
    return _LONE_SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
