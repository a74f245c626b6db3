"""A function that fails now and then, for workers under siege."""

from random import Random
from typing import Any

import shoal

FAILS = 0.05  # the share of calls
CHANCE = Random()


@shoal.task(name="echo")
def echo(**fields: Any) -> dict[str, Any]:
    """Return the fields of a task, or fail."""
    if CHANCE.random() < FAILS:
        raise ValueError("not this time")
    return fields
