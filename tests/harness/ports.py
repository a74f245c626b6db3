"""Ports that are free, and stay so while nothing listens yet."""

import socket
from contextlib import ExitStack, suppress
from random import Random

PORTS = range(10_000, 20_000)
"""Below those that systems give away, and those that `shoal run` gives to rank 0.

Another program would be given a port that is free; and whoever dials one of those
before somebody listens might be given that very one, and be connected with itself.
"""


def free_port(count: int = 1) -> int:
    """Return a port of this machine that is free, as are ``count - 1`` after it."""
    for first in Random().sample(PORTS[: -count or None], 100):
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError(f"none of 100 ports from {PORTS[0]} to {PORTS[-1]} is free")
