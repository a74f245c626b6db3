"""Slows down and then bars addresses that present wrong keys or tokens."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from shoal.domain.addresses import is_loopback, owner_of
from shoal.domain.errors import TooManyFailures

WINDOW = 60.0  # seconds within which failures count together
SLOW_AFTER = 5  # failures that are answered at once
SLOWNESS = 0.25  # seconds that the answer to each further one is kept back
BARRED_AFTER = 10  # failures
BARRED_FOR = 60.0  # seconds
ADDRESSES_MAX = 10_000  # remembered; the one that failed longest ago goes first


@dataclass(slots=True)
class _Record:
    count: int
    since: float
    barred_until: float = 0.0


class Failures:
    """What has failed lately, by address.  Times are monotonic seconds.

    An address that is barred is refused whatever it presents, or else it could go on
    guessing.  A loopback address is not: its user would be locked out by any other
    program of this machine, so there the right key always works.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raise TooManyFailures if the address may not present anything now."""
        if self._records and not is_loopback(address):
            self._check(address, now)

    def failed(self, address: str, now: float) -> float:
        """Note a failure; return for how many seconds to keep the answer back.

        Raises TooManyFailures if there were too many before.
        """
        self._check(address, now)
        who = owner_of(address)
        record = self._records.pop(who, None)
        if record is None or now >= record.since + WINDOW:
            record = _Record(0, now)
        record.count += 1
        if record.count >= BARRED_AFTER:
            record = _Record(0, now, now + BARRED_FOR)
        self._records[who] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        return SLOWNESS if record.count > SLOW_AFTER else 0.0

    def _check(self, address: str, now: float) -> None:
        record = self._records.get(owner_of(address))
        if record is None or now >= record.barred_until:
            return
        wait = math.ceil(record.barred_until - now)
        raise TooManyFailures(
            f"too many wrong keys or tokens from this address: try again in {wait} s",
            wait,
        )
