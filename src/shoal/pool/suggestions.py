"""Suggestions for a name that no worker offers."""

import difflib
from collections.abc import Iterable
from itertools import islice

LISTED_MAX = 5  # names listed if none is similar
COMPARED_MAX = 100  # names compared, which takes time


def suggest_names(name: str, known: Iterable[str], listing: str) -> str | None:
    """Suggest similar names, or list some; None if no name is known.

    ``listing`` says where to find all of them.
    """
    names = sorted(islice(known, COMPARED_MAX))
    if not names:
        return None
    if similar := difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(similar)}?"
    more = f"; {listing}" if len(names) > LISTED_MAX else ""
    return f"there is {', '.join(names[:LISTED_MAX])}{more}"
