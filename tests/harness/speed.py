"""The speed of this machine relative to the reference machine of the limits.

Measured once, by the process that starts the suite; every process below it inherits
the figure.  A limit that a test waits for is multiplied by it, so that a slow or busy
machine gets the same chance.  No test passes sooner or later because of it.
"""

import os
import time

VARIABLE = "SHOAL_TESTS_SLOWNESS"
REFERENCE = 0.024  # seconds that a round takes on one free core of 2025
ROUNDS = 8
SLOWNESS_MAX = 20.0


def slowness() -> float:
    """Return the slowness, at least 1.0; measure it unless a parent process has."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{measured():.2f}"
    return float(os.environ[VARIABLE])


def measured() -> float:
    """Measure.  Wall-clock time, for what counts is what else runs here as well."""
    began = time.perf_counter()
    for _ in range(ROUNDS):
        run_round()
    seconds = (time.perf_counter() - began) / ROUNDS
    return min(max(seconds / REFERENCE, 1.0), SLOWNESS_MAX)


def scaled(seconds: float) -> float:
    """Return a limit for this machine, given one for the reference machine."""
    return seconds * slowness()


def run_round() -> None:
    """Compute for ``REFERENCE`` seconds on the reference machine."""
    table: dict[int, bytes] = {}
    for number in range(200_000):
        table[number % 1000] = str(number).encode()


PATIENCE = scaled(30.0)
"""Seconds until what a test waits for is taken not to happen: it guards against hangs,
and no test waits for its end."""
