"""Limits on the depth and size of JSON from other programs."""

from collections.abc import Iterable, Mapping, Sequence

NESTING_MAX = 100  # nested lists and objects; engines support no more either
VALUES_MAX = 1 << 16  # values in a body: at most 0.1 s, whatever becomes of them

WINDOW = 1 << 18  # characters that are split at once, which bounds the memory


def is_too_deep(value: object) -> bool:
    """Return whether a value is nested more deeply than ``NESTING_MAX``."""
    level = [value]
    for _ in range(NESTING_MAX + 1):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def may_be_too_deep(text: str) -> bool:
    """Return whether JSON may be that deep, by its brackets: fast, and rarely true."""
    return text.count("[") + text.count("{") > NESTING_MAX


def has_more_values(text: str, most: int) -> bool:
    """Return whether JSON has more than ``most`` values, before it is decoded.

    Each value follows a comma or a bracket.  Strings may be long and full of those, so
    they are skipped: once escaped quotes are gone, they are what is between quotes.
    """
    if _marks(text) <= most:
        return False
    marks = quotes = begin = 0
    while begin < len(text):
        window = text[begin : begin + WINDOW]
        if (len(window) - len(window.rstrip("\\"))) % 2 and len(window) > 1:
            window = window[:-1]  # else an escape would be cut in half
        begin += len(window)
        pieces = [window]
        if '"' in window:
            pieces = window.replace("\\\\", "").replace('\\"', "").split('"')
        marks += _marks("".join(pieces[quotes % 2 :: 2]))
        quotes += len(pieces) - 1
        # A value has at most two strings: its name and itself.
        if marks > most or quotes > 4 * most:
            return True
    return False


def characters_in(values: Iterable[object], at_most: int | None = None) -> int:
    """Count the characters of all strings in JSON, and one for each other value.

    Stops counting beyond ``at_most``.
    """
    found = 0
    left = [*values]
    while left and (at_most is None or found < at_most):
        match left.pop():
            case str() as text:
                found += len(text)
            case None | int() | float():  # these are known sooner than by abstract
                found += 1  # classes, which are asked by functions of Python
            case list() | tuple() as items:
                found += len(items)
                left += items
            case dict() | Mapping() as fields:
                found += len(fields)
                left += fields.values()
            case Sequence() as items:
                found += len(items)
                left += items
            case _:
                found += 1
    return found


def _marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")
