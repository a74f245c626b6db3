"""Durations as people write them: 90s, 15m, 12h, 30d, 52w."""

import re
from argparse import ArgumentTypeError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_DURATION = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)


def duration(text: str) -> int:
    """Return the seconds that a text stands for.

    Raises argparse's error, as a flag's type does.
    """
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise ArgumentTypeError(f"expected a time such as 12h or 30d, got {text!r}")
    return int(found[1]) * SECONDS[found[2]]
