"""Amounts in whole micro-dollars, and their text form."""

import re
from typing import NewType

from shoal.domain.errors import ConfigError

Micros = NewType("Micros", int)
"""Millionths of a dollar."""

MICROS = 1_000_000  # to a dollar
DECIMALS_MAX = 6
DECIMALS_MIN = 3  # as prices are written: $0.010

DOLLARS_MAX = 1_000_000_000
"""The largest amount accepted: sums of many such amounts still fit into JSON."""

# Not \d, which matches the digits of every script.
_DOLLARS = re.compile(r"\$?([0-9]+)(?:\.([0-9]+))?", re.ASCII)
_SHOWN_MAX = 40  # characters of an invalid amount in errors


def parse_dollars(text: str) -> Micros:
    """Parse an amount such as ``$0.010``, ``0.01`` or ``5``.

    Raises ConfigError with the text and the expected form.
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
    """Format an amount with as many decimals as it has, and at least three."""
    whole, rest = divmod(abs(micros), MICROS)
    decimals = f"{rest:06}".rstrip("0").ljust(DECIMALS_MIN, "0")
    return f"{'-' if micros < 0 else ''}${whole}.{decimals}"
