"""A histogram that metrics read when scraped; a value costs a call or less."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
                 2.5, 5.0, 10.0)  # fmt: skip
"""Upper bounds of buckets, for what should take milliseconds."""


class Histogram:
    """Counts values by bucket.

    ``counts`` has one entry for each of ``bounds``, the inclusive upper bounds of the
    buckets, and a last one for the values above them; ``total`` is the sum of all
    values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


def observe(*values: tuple[Histogram, float]) -> None:
    """Count values, each in its histogram."""
    for histogram, value in values:
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value
