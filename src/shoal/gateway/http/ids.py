"""Unique ids for jobs, requests and spans, not for secrets.

They come from a generator that the system seeds once in each process: asking the
system for each id costs more than everything else about it.
"""

import os
import random
import secrets  # noqa: TID251  # for the first state alone

_random = random.Random(secrets.randbits(256))
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _random.seed(secrets.randbits(256)))


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"


def new_trace_id() -> str:
    """Return 32 hexadecimal digits, not all 0."""
    return f"{_random.randrange(1, 1 << 128):032x}"


def new_span_id() -> str:
    """Return 16 hexadecimal digits, not all 0."""
    return f"{_random.randrange(1, 1 << 64):016x}"
