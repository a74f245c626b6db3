"""Limits guesses of secrets: by address, by pairing code, by kind, and in all.

A generated secret needs no protection from guesses, and a limit that others can exhaust
would lock its owner out.  So the limits that an attacker shares with the owner, in all
and of a loopback address, hold for guessable secrets only.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from shoal.domain.addresses import is_loopback, network_key
from shoal.domain.errors import TooManyFailures
from shoal.domain.settings import is_guessable

WINDOW = 60.0  # seconds within which failures count together
DELAY_AFTER = 5  # failures without a delay
DELAY = 0.25  # seconds by which each further answer is delayed
BLOCK_AFTER = 10  # failures
BLOCK_SECONDS = 60.0  # seconds
ADDRESSES_MAX = 10_000  # addresses; the least recent failure is evicted first

KIND_FAILURES_MAX = 100  # of one kind in a window, from all addresses
FAILURES_MAX = 200  # of all kinds in a window, from all addresses

CODE_FAILURES_MAX = 5  # wrong codes that begin alike
CODE_WINDOW = 3600.0  # seconds: the lifetime of a code
CODES_MAX = 10_000  # beginnings; the least recent failure is evicted first


class CredentialKind(Enum):
    """The kinds of secrets, whose failures are counted apart."""

    API_KEY = "API keys"
    JOIN_TOKEN = "join tokens"
    PASSCODE = "passcodes or fleet tokens"
    PAIRING_CODE = "pairing codes"
    SIGN_IN_CODE = "sign-in codes"


@dataclass(slots=True)
class _FailureRecord:
    count: int
    since: float
    blocked_until: float = 0.0


class AuthThrottle:
    """Recent failures.  Times are monotonic seconds.

    A blocked address is refused whatever it presents of that kind: otherwise it could
    go on guessing.  The exception are secrets that are not guessable, from loopback:
    any program of this machine, and any client of a proxy on it, could lock out the
    others.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[tuple[CredentialKind, str], _FailureRecord] = (
            OrderedDict()
        )
        self._codes: OrderedDict[str, _FailureRecord] = OrderedDict()
        self._kinds = {kind: _FailureRecord(0, 0.0) for kind in CredentialKind}
        self._all = _FailureRecord(0, 0.0)

    @property
    def has_any(self) -> bool:
        """Whether ``check`` may refuse anything."""
        return bool(self._records)

    def check(
        self, kind: CredentialKind, address: str, now: float, secret: str | None = None
    ) -> None:
        """Raise TooManyFailures if a secret of a kind may not be presented.

        ``secret`` is the one that is presented; None: it is not known yet, so only a
        block of the address counts, unless it is a loopback address.
        """
        if not self.has_any:
            return
        wait = self._blocked_for(kind, address, now)
        if wait and (not is_loopback(address) or _is_presented_guess(secret)):
            raise _too_many(f"wrong {kind.value} from this address", wait)
        wait = self._spent_for(kind, now)
        if wait and _is_presented_guess(secret):
            raise _too_many(f"wrong {kind.value}", wait)

    def record_failure(self, kind: CredentialKind, address: str, now: float) -> float:
        """Record a failure; return by how many seconds to delay the answer.

        Raises TooManyFailures if the address is blocked.
        """
        if wait := self._blocked_for(kind, address, now):
            raise _too_many(f"wrong {kind.value} from this address", wait)
        for total in (self._kinds[kind], self._all):
            _count(total, now, WINDOW)
        who = (kind, network_key(address))
        record = self._records.pop(who, None) or _FailureRecord(0, now)
        _count(record, now, WINDOW)
        if record.count >= BLOCK_AFTER:
            record = _FailureRecord(0, now, now + BLOCK_SECONDS)
        self._records[who] = record
        if len(self._records) > ADDRESSES_MAX:
            self._records.popitem(last=False)
        return DELAY if record.count > DELAY_AFTER else 0.0

    def check_code(self, beginning: str, now: float) -> None:
        """Raise TooManyFailures if too many wrong codes began like this one.

        Whether there is a right one makes no difference.
        """
        record = self._codes.get(beginning)
        if record is not None and record.count >= CODE_FAILURES_MAX:
            wait = record.since + CODE_WINDOW - now
            if wait > 0:
                raise _too_many("wrong codes that begin like this one", wait)

    def record_code_failure(self, beginning: str, now: float) -> None:
        """Record a wrong pairing code by its beginning."""
        record = self._codes.pop(beginning, None) or _FailureRecord(0, now)
        _count(record, now, CODE_WINDOW)
        self._codes[beginning] = record
        if len(self._codes) > CODES_MAX:
            self._codes.popitem(last=False)

    def _blocked_for(self, kind: CredentialKind, address: str, now: float) -> float:
        """Return for how many more seconds an address is blocked."""
        record = self._records.get((kind, network_key(address)))
        return max(0.0, record.blocked_until - now) if record is not None else 0.0

    def _spent_for(self, kind: CredentialKind, now: float) -> float:
        """Return for how many more seconds no guess of a kind is accepted."""
        limits = ((self._kinds[kind], KIND_FAILURES_MAX), (self._all, FAILURES_MAX))
        return max(
            record.since + WINDOW - now if record.count >= limit else 0.0
            for record, limit in limits
        )


def _count(record: _FailureRecord, now: float, window: float) -> None:
    """Count a failure in a window that begins with its first failure."""
    if not record.count or now >= record.since + window:
        record.count, record.since = 0, now
    record.count += 1


def _is_presented_guess(secret: str | None) -> bool:
    return secret is not None and is_guessable(secret)


def _too_many(what: str, wait: float) -> TooManyFailures:
    seconds = math.ceil(wait)
    return TooManyFailures(f"too many {what}: try again in {seconds} s", seconds)
