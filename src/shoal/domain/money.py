"""Money as whole micro-dollars, and as people write it."""

import re
from typing import NewType

from shoal.domain.errors import ConfigError

Micros = NewType("Micros", int)
"""Millionths of a dollar."""

MICROS = 1_000_000  # to a dollar
DECIMALS_MAX = 6
DECIMALS_MIN = 3  # as prices are written: $0.010

DOLLARS_MAX = 1_000_000_000
"""The largest sum that is read: sums of sums still fit into what JSON can carry."""

# Not \d, which is any script's digits here.
_DOLLARS = re.compile(r"\$?([0-9]+)(?:\.([0-9]+))?", re.ASCII)
_SHOWN_MAX = 40  # characters of what cannot be read


def parse_dollars(text: str) -> Micros:
    """Read a sum such as ``$0.010``, ``0.01`` or ``5``.

    Raises ConfigError, which shows what was written and what is expected.
    """
    shown = repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")
    found = _DOLLARS.fullmatch(text)
    if found is None:
        raise ConfigError(f"expected dollars such as $0.010 or 5, got {shown}")
    decimals = found[2] or ""
    if len(decimals) > DECIMALS_MAX:
        raise ConfigError(
            f"{shown} has {len(decimals)} decimals, and money at most {DECIMALS_MAX}"
        )
    # Compared by length first: numbers of thousands of digits are slow to convert.
    whole = found[1].lstrip("0")
    micros = int(decimals.ljust(DECIMALS_MAX, "0"))
    if len(whole) <= len(str(DOLLARS_MAX)):
        micros += int(whole or "0") * MICROS
        if micros <= DOLLARS_MAX * MICROS:
            return Micros(micros)
    raise ConfigError(f"{shown} is more than the limit of ${DOLLARS_MAX:,}")


def dollars(micros: int) -> str:
    """Write a sum, with as many decimals as it has, and at least three."""
    whole, rest = divmod(abs(micros), MICROS)
    decimals = f"{rest:06}".rstrip("0").ljust(DECIMALS_MIN, "0")
    return f"{'-' if micros < 0 else ''}${whole}.{decimals}"
