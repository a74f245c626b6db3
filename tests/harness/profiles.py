"""Numbers of examples: few in ``make test``, many in ``make test-long``.

That goes for seeds and for the examples that Hypothesis draws.  No profile has a
deadline, for how long an example takes says how busy the machine is.
The short and the long profile draw the same examples each time, so that a test that
fails fails because of a change; the fresh one, of every night, draws new ones, and
prints how to draw a failing one again.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SHORT, LONG, FRESH = "short", "long", "fresh"


def register() -> None:
    """Register the profiles of Hypothesis; ``--hypothesis-profile`` selects one."""
    settings.register_profile(SHORT, deadline=None, max_examples=25, derandomize=True)
    settings.register_profile(LONG, deadline=None, max_examples=100, derandomize=True)
    settings.register_profile(FRESH, deadline=None, max_examples=100, print_blob=True)
    settings.load_profile(SHORT)


def examples(share: float) -> int:
    """Return this share of the profile's examples, for a test that is slow at each."""
    return max(round(settings().max_examples * share), 5)


def some_long(values: Iterable[Any], short: int) -> list[Any]:
    """Return values to be a test's parameters: the first ``short`` of them, and others
    with which the test is long.
    """
    return [
        value if place < short else pytest.param(value, marks=pytest.mark.long)
        for place, value in enumerate(values)
    ]
