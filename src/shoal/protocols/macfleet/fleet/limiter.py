"""Slows down and then bars addresses that present what no member of the fleet would.

Source: MacFleet's rate limiter, which both its ports have.  Two things are stricter.
Connections of an address that has failed are counted while nobody knows yet what they
will present, and once it is barred, nothing that they present is looked at: so guesses
made at the same time are no more than those made one after the other.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, owner_of
from shoal.domain.errors import Unavailable
from shoal.protocols.session import Guesses

DELAY_FIRST = 0.5  # seconds after one failure; each further one doubles it
BARRED_AFTER = 5  # failures
BARRED_FOR = 300.0  # seconds since the last of them
LOCAL_DELAY_MAX = 0.5  # seconds for programs of this machine
ADDRESSES_MAX = 10_000  # remembered; the one that failed longest ago goes first
UNDECIDED_MAX = 64  # connections of one address that are counted at a time
UNDECIDED_FOR = 60.0  # seconds after which a connection is not waited for any more


@dataclass(slots=True)
class _Record:
    failures: int = 0
    last: float = 0.0


class Limiter:
    """A ``Gate``, which sessions tell what became of those that it let pass.

    Each connection that ``delay`` lets pass ends in one of ``right``, ``wrong`` and
    ``left``, or in ``failed``.  An address stands for its owner: with IPv6 for a whole
    network.  Programs of this machine are slowed down a little and never barred, or
    else any of them could lock out all others.  ``guesses`` is what other wires count
    by: who is barred there is barred here.
    """

    def __init__(self, guesses: Guesses) -> None:
        self._guesses = guesses
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._undecided: OrderedDict[str, deque[float]] = OrderedDict()

    def delay(self, address: str, now: float) -> float | None:
        """Return for how many seconds to leave a connection unread; None: hang up."""
        if self.barred(address, now):
            return None
        owner = owner_of(address)
        failures = record.failures if (record := self._records.get(owner)) else 0
        pending = self._wait_for(owner, now)
        if not failures:
            # Several honest nodes may share an address, and all come at once.
            return 0.0
        counted = min(failures + pending, BARRED_AFTER - 1)
        wait = DELAY_FIRST * 2.0 ** (counted - 1)
        return min(wait, LOCAL_DELAY_MAX) if is_loopback(address) else wait

    def failed(self, address: str, now: float) -> None:
        """Take note of a connection on which TLS did not come about: no guess."""
        self.left(address, now)

    def barred(self, address: str, now: float) -> bool:
        """Say whether nothing is to be looked at that comes from an address."""
        try:
            self._guesses.check(address)
        except Unavailable:
            return True
        owner = owner_of(address)
        record = self._records.get(owner)
        if record is None or record.failures < BARRED_AFTER or is_loopback(address):
            return False
        if now - record.last > BARRED_FOR:
            del self._records[owner]
            return False
        return True

    def right(self, address: str, now: float) -> None:
        """Take note that a connection was a member's: what was before is forgotten."""
        self.left(address, now)
        self._records.pop(owner_of(address), None)

    def wrong(self, address: str, now: float) -> None:
        """Count a failure."""
        self.left(address, now)
        owner = owner_of(address)
        record = self._records.pop(owner, None) or _Record()
        record.failures += 1
        record.last = now
        self._records[owner] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        self._guesses.failed(address)

    def left(self, address: str, now: float) -> None:
        """Take note of a connection that ended without a guess."""
        owner = owner_of(address)
        undecided = self._undecided.get(owner)
        if undecided is None:
            return
        undecided.popleft()
        if not undecided:
            del self._undecided[owner]

    def _wait_for(self, owner: str, now: float) -> int:
        """Count a connection as undecided; return how many others of it there are."""
        since = self._undecided.setdefault(owner, deque())
        while since and now - since[0] > UNDECIDED_FOR:
            since.popleft()
        others = len(since)
        if others < UNDECIDED_MAX:
            since.append(now)
        if len(self._undecided) > ADDRESSES_MAX:
            self._undecided.popitem(last=False)
        return others
