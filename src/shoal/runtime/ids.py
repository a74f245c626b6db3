"""Ids that nobody else has: for jobs and requests, not for secrets.

Drawn from a generator that the system's randomness began: asking the system for each
costs more than all else about an id.
"""

import random
import secrets

_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"
