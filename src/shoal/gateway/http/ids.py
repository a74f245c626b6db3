"""Unique ids for jobs and requests, not for secrets.

They come from a generator that the system seeds once: asking the system for each id
costs more than everything else about it.
"""

import random
import secrets

_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"
