"""Ids of the tasks that a peer is given: all different, and none to be guessed."""

import hashlib
from collections.abc import Callable

SEED_SIZE = 32  # bytes
ID_SIZE = 32  # hexadecimal digits, as real peers have it


class Tickets:
    """Makes one id after the other, out of what is drawn once."""

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._seed = hashlib.sha256(draw(SEED_SIZE))
        self._count = 0

    def next(self) -> str:
        """Return an id that was not there before."""
        self._count += 1
        made = self._seed.copy()
        made.update(self._count.to_bytes(8))
        return made.hexdigest()[:ID_SIZE]
