"""Delays and then bans addresses whose connections fail to authenticate.

Source: MacFleet's rate limiter, on both its ports.  Two things are stricter here.
Pending connections of an address that has failed count as failures, and the messages of
a banned address are ignored even on open connections.  So parallel guesses are limited
as strictly as sequential ones.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, network_key
from shoal.domain.errors import Unavailable
from shoal.protocols.seam.admission import Throttle

DELAY_FIRST = 0.5  # seconds after one failure; doubled by each further one
BANNED_AFTER = 5  # failures
BAN_DURATION = 300.0  # seconds since the last failure
LOCAL_DELAY_MAX = 0.5  # seconds, for loopback addresses that are spared
ADDRESSES_MAX = 10_000  # remembered; the oldest failure is evicted first
PENDING_MAX = 64  # pending connections of one address that are counted
PENDING_TIMEOUT = 60.0  # seconds after which a connection is no longer pending


@dataclass(slots=True)
class _FailureRecord:
    failures: int = 0
    last: float = 0.0


class FleetRateLimiter:
    """A ``ConnectionGate``; sessions report the outcome of each connection to it.

    Each connection that ``delay`` accepts ends in ``on_success``, ``on_failure``,
    ``on_abandoned`` or ``failed``.  An IPv6 address stands for its network.
    ``throttle`` is the throttle of all protocols: an address that it bans is banned
    here.  ``spares_loopback``: loopback addresses are delayed a little and never
    banned, for fleets without a token.  Where there is a token to guess, a local
    program is limited like any other, although it can lock out the rest of its machine.
    """

    def __init__(self, throttle: Throttle, *, spares_loopback: bool = False) -> None:
        self._throttle = throttle
        self._spares_loopback = spares_loopback
        self._records: OrderedDict[str, _FailureRecord] = OrderedDict()
        self._pending: OrderedDict[str, deque[float]] = OrderedDict()

    def delay(self, address: str, now: float) -> float | None:
        """Return the delay in seconds before reading a connection; None: close it."""
        if self.is_banned(address, now):
            return None
        key = network_key(address)
        failures = record.failures if (record := self._records.get(key)) else 0
        pending = self._add_pending(key, now)
        if not failures:
            # Many honest nodes may share an address and connect at once.
            return 0.0
        failures_counted = min(failures + pending, BANNED_AFTER - 1)
        delay = DELAY_FIRST * 2.0 ** (failures_counted - 1)
        return min(delay, LOCAL_DELAY_MAX) if self._spares(address) else delay

    def failed(self, address: str, now: float) -> None:
        """Record a connection whose TLS handshake failed: not a guess."""
        self.on_abandoned(address, now)

    def is_banned(self, address: str, now: float) -> bool:
        """Say whether an address is banned."""
        try:
            self._throttle.check(address)
        except Unavailable:
            return True
        key = network_key(address)
        record = self._records.get(key)
        if record is None or record.failures < BANNED_AFTER or self._spares(address):
            return False
        if now - record.last > BAN_DURATION:
            del self._records[key]
            return False
        return True

    def on_success(self, address: str, now: float) -> None:
        """Record an authenticated connection; the address's failures are forgotten."""
        self.on_abandoned(address, now)
        self._records.pop(network_key(address), None)

    def on_failure(self, address: str, now: float) -> None:
        """Record a failure."""
        self.on_abandoned(address, now)
        key = network_key(address)
        record = self._records.pop(key, None) or _FailureRecord()
        record.failures += 1
        record.last = now
        self._records[key] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        self._throttle.failed(address)

    def on_abandoned(self, address: str, now: float) -> None:
        """Record a connection that ended before it presented anything."""
        key = network_key(address)
        pending = self._pending.get(key)
        if pending is None:
            return
        pending.popleft()
        if not pending:
            del self._pending[key]

    def _spares(self, address: str) -> bool:
        return self._spares_loopback and is_loopback(address)

    def _add_pending(self, key: str, now: float) -> int:
        """Add a pending connection; return how many others the address has."""
        pending = self._pending.setdefault(key, deque())
        while pending and now - pending[0] > PENDING_TIMEOUT:
            pending.popleft()
        others = len(pending)
        if others < PENDING_MAX:
            pending.append(now)
        if len(self._pending) > ADDRESSES_MAX:
            self._pending.popitem(last=False)
        return others
