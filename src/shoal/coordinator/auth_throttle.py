"""Delays and then blocks addresses that present wrong keys or tokens."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, network_key
from shoal.domain.errors import TooManyFailures

WINDOW = 60.0  # seconds within which failures count together
DELAY_AFTER = 5  # failures without a delay
DELAY = 0.25  # seconds by which each further answer is delayed
BLOCK_AFTER = 10  # failures
BLOCK_SECONDS = 60.0  # seconds
ADDRESSES_MAX = 10_000  # addresses; the least recent failure is evicted first


@dataclass(slots=True)
class _FailureRecord:
    count: int
    since: float
    blocked_until: float = 0.0


class AuthThrottle:
    """Recent failures by address.  Times are monotonic seconds.

    A blocked address is refused whatever it presents: otherwise it could go on
    guessing.  Loopback addresses are never blocked, because any program of this machine
    could lock out its user.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, _FailureRecord] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raise TooManyFailures if the address is blocked."""
        if self._records and not is_loopback(address):
            self._check(address, now)

    def record_failure(self, address: str, now: float) -> float:
        """Record a failure; return by how many seconds to delay the answer.

        Raises TooManyFailures if the address is blocked.
        """
        self._check(address, now)
        who = network_key(address)
        record = self._records.pop(who, None)
        if record is None or now >= record.since + WINDOW:
            record = _FailureRecord(0, now)
        record.count += 1
        if record.count >= BLOCK_AFTER:
            record = _FailureRecord(0, now, now + BLOCK_SECONDS)
        self._records[who] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        return DELAY if record.count > DELAY_AFTER else 0.0

    def _check(self, address: str, now: float) -> None:
        record = self._records.get(network_key(address))
        if record is None or now >= record.blocked_until:
            return
        wait = math.ceil(record.blocked_until - now)
        raise TooManyFailures(
            f"too many wrong keys or tokens from this address: try again in {wait} s",
            wait,
        )
