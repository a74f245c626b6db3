"""Slows down and then bars addresses that present what no member of the fleet would.

Source: MacFleet's rate limiter, which both its ports have.  Two things are stricter.
Connections of an address that has failed are counted while nobody knows yet what they
will present, and once it is barred, nothing that they present is looked at: so guesses
made at the same time are no more than those made one after the other.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, network_key
from shoal.domain.errors import Unavailable
from shoal.protocols.seam.session import Throttle

DELAY_FIRST = 0.5  # seconds after one failure; each further one doubles it
BANNED_AFTER = 5  # failures
BAN_DURATION = 300.0  # seconds since the last of them
LOCAL_DELAY_MAX = 0.5  # seconds for programs of this machine
ADDRESSES_MAX = 10_000  # remembered; the one that failed longest ago goes first
PENDING_MAX = 64  # connections of one address that are counted at a time
PENDING_TIMEOUT = 60.0  # seconds after which a connection is not waited for any more


@dataclass(slots=True)
class _FailureRecord:
    failures: int = 0
    last: float = 0.0


class FleetRateLimiter:
    """A ``Gate``, which sessions tell what became of those that it let pass.

    Each connection that ``delay`` lets pass ends in one of ``on_success``,
    ``on_failure`` and ``on_abandoned``, or in ``failed``.  An address stands for its
    owner: with IPv6 for a whole network.  Programs of this machine are slowed down a
    little and never barred, or else any of them could lock out all others.
    ``guesses`` is what other wires count by: who is barred there is barred here.
    """

    def __init__(self, guesses: Throttle) -> None:
        self._guesses = guesses
        self._records: OrderedDict[str, _FailureRecord] = OrderedDict()
        self._pending: OrderedDict[str, deque[float]] = OrderedDict()

    def delay(self, address: str, now: float) -> float | None:
        """Return for how many seconds to leave a connection unread; None: hang up."""
        if self.is_banned(address, now):
            return None
        owner = network_key(address)
        failures = record.failures if (record := self._records.get(owner)) else 0
        pending = self._add_pending(owner, now)
        if not failures:
            # Several honest nodes may share an address, and all come at once.
            return 0.0
        counted = min(failures + pending, BANNED_AFTER - 1)
        wait = DELAY_FIRST * 2.0 ** (counted - 1)
        return min(wait, LOCAL_DELAY_MAX) if is_loopback(address) else wait

    def failed(self, address: str, now: float) -> None:
        """Take note of a connection on which TLS did not come about: no guess."""
        self.on_abandoned(address, now)

    def is_banned(self, address: str, now: float) -> bool:
        """Say whether nothing is to be looked at that comes from an address."""
        try:
            self._guesses.check(address)
        except Unavailable:
            return True
        owner = network_key(address)
        record = self._records.get(owner)
        if record is None or record.failures < BANNED_AFTER or is_loopback(address):
            return False
        if now - record.last > BAN_DURATION:
            del self._records[owner]
            return False
        return True

    def on_success(self, address: str, now: float) -> None:
        """Take note that a connection was a member's: what was before is forgotten."""
        self.on_abandoned(address, now)
        self._records.pop(network_key(address), None)

    def on_failure(self, address: str, now: float) -> None:
        """Count a failure."""
        self.on_abandoned(address, now)
        owner = network_key(address)
        record = self._records.pop(owner, None) or _FailureRecord()
        record.failures += 1
        record.last = now
        self._records[owner] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        self._guesses.failed(address)

    def on_abandoned(self, address: str, now: float) -> None:
        """Take note of a connection that ended without a guess."""
        owner = network_key(address)
        undecided = self._pending.get(owner)
        if undecided is None:
            return
        undecided.popleft()
        if not undecided:
            del self._pending[owner]

    def _add_pending(self, owner: str, now: float) -> int:
        """Count a connection as undecided; return how many others of it there are."""
        since = self._pending.setdefault(owner, deque())
        while since and now - since[0] > PENDING_TIMEOUT:
            since.popleft()
        others = len(since)
        if others < PENDING_MAX:
            since.append(now)
        if len(self._pending) > ADDRESSES_MAX:
            self._pending.popitem(last=False)
        return others
