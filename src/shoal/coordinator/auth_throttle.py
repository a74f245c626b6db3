"""Delays and then blocks addresses that present wrong keys or tokens."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, network_key
from shoal.domain.errors import TooManyFailures

WINDOW = 60.0  # seconds within which failures count together
DELAY_AFTER = 5  # failures that are answered at once
DELAY = 0.25  # seconds that the answer to each further one is kept back
BLOCK_AFTER = 10  # failures
BLOCK_SECONDS = 60.0  # seconds
ADDRESSES_MAX = 10_000  # remembered; the one that failed longest ago goes first


@dataclass(slots=True)
class _FailureRecord:
    count: int
    since: float
    blocked_until: float = 0.0


class AuthThrottle:
    """What has failed lately, by address.  Times are monotonic seconds.

    An address that is barred is refused whatever it presents, or else it could go on
    guessing.  A loopback address is not: its user would be locked out by any other
    program of this machine, so there the right key always works.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, _FailureRecord] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raise TooManyFailures if the address may not present anything now."""
        if self._records and not is_loopback(address):
            self._check(address, now)

    def record_failure(self, address: str, now: float) -> float:
        """Note a failure; return for how many seconds to keep the answer back.

        Raises TooManyFailures if there were too many before.
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
