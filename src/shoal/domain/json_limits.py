"""Limits on the depth and size of JSON from other programs, before it is decoded."""

import re

NESTING_MAX = 100  # nested lists and objects; engines support no more either

# Also matches an unterminated string, so that no text is scanned twice.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


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
    they are skipped, but only a bounded number: the time is proportional to ``most``.
    """
    if _marks(text, 0, len(text)) <= most:
        return False
    marks = end = 0
    for strings, string in enumerate(_STRING.finditer(text)):
        marks += _marks(text, end, string.start())
        # A value has at most two strings: its name and itself.
        if marks > most or strings > 2 * most:
            return True
        end = string.end()
    return marks + _marks(text, end, len(text)) > most


def _marks(text: str, start: int, end: int) -> int:
    return sum(text.count(mark, start, end) for mark in ",[{")
