"""Rate limits and token budgets of API keys, also for jobs that outlive their request.

Pure arithmetic on monotonic seconds.  Nothing is stored: limits per minute start
afresh with the coordinator, and open jobs reserve their tokens again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.domain.credentials import DAY, Key, KeyUsage, Quota, usage_of
from shoal.domain.errors import BudgetSpent, DaySpent, InvalidRequest, RateLimited
from shoal.domain.facts import JOB_ENDS, Fact, JobCompleted, JobEnd
from shoal.domain.ids import JobId
from shoal.domain.work import Work

NO_QUOTA = Quota()
MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # seconds: no client waits for a rounding error


@dataclass(slots=True)
class TokenBucket:
    """A token bucket that holds a minute's worth, and fills in a minute.

    ``limit`` is at least 1.  The level is negative when a job used more than it
    reserved.
    """

    limit: int
    level: float
    at: float

    @classmethod
    def full(cls, limit: int, now: float) -> "TokenBucket":
        return cls(limit, limit, now)

    def refill(self, now: float) -> None:
        """Add what has accrued since the last refill."""
        passed = max(0.0, now - self.at)
        self.level = min(self.limit, self.level + self.limit * passed / MINUTE)
        self.at = now

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until ``amount`` is available, if it fits."""
        return max(0.0, amount - self.level) * MINUTE / self.limit

    def take(self, amount: float) -> None:
        """Take ``amount``; a negative one is returned to the bucket."""
        self.level = min(self.limit, self.level - amount)


@dataclass(slots=True)
class Reservation:
    """Tokens reserved by a request.

    ``before`` is what other open requests of the key had reserved already.
    """

    tokens: int
    before: int


@dataclass(slots=True)
class KeyLimiter:
    """The limits of one key, and the remaining amounts."""

    quota: Quota
    requests: TokenBucket | None
    tokens: TokenBucket | None
    reserved: int = 0  # tokens, by open requests

    @classmethod
    def of(cls, quota: Quota, now: float) -> "KeyLimiter":
        by_request, by_token = quota.requests_per_minute, quota.tokens_per_minute
        return cls(
            quota,
            None if by_request is None else TokenBucket.full(by_request, now),
            None if by_token is None else TokenBucket.full(by_token, now),
        )

    def reserve(self, tokens: int, now: float) -> Reservation:
        """Reserve one request and ``tokens``, both or neither.

        Raises RateLimited, or InvalidRequest for more tokens than the limit.
        """
        for bucket, amount, what in (
            (self.requests, 1, "requests"),
            (self.tokens, tokens, "tokens"),
        ):
            if bucket is None:
                continue
            bucket.refill(now)
            if amount > bucket.limit:
                raise InvalidRequest(
                    f"the request needs about {amount} tokens, and this key may use "
                    f"{bucket.limit} a minute: lower max_tokens, or shorten the "
                    "messages",
                    "max_tokens",
                )
            if (wait := bucket.seconds_until(amount)) > ROUNDING:
                seconds = math.ceil(wait)
                raise RateLimited(
                    f"this key may use {bucket.limit} {what} a minute: try again in "
                    f"{seconds} s",
                    seconds,
                )
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)
        return self.restore(tokens)

    def restore(self, tokens: int) -> Reservation:
        """Reserve the tokens of a request that was accepted before a restart.

        They count towards the budget and the day; a minute starts afresh.
        """
        reservation = Reservation(tokens, self.reserved)
        self.reserved += tokens
        return reservation

    def check_budget(self, reservation: Reservation, used: KeyUsage, at: float) -> None:
        """Raise DaySpent or BudgetSpent if the reservation exceeds the rest.

        ``used`` is the stored usage, ``at`` the time in Unix seconds.  A request that
        ends while the store is read may count twice; none is ever left out.
        """
        wanted = reservation.before + reservation.tokens
        in_all, today = used.tokens, used.tokens_today
        if (budget := self.quota.budget) is not None and in_all + wanted > budget:
            raise BudgetSpent(
                f"this key has {_left(budget, in_all + reservation.before)} of its "
                f"{budget} tokens left, and the request needs about "
                f"{reservation.tokens}"
            )
        day_max = self.quota.tokens_per_day
        if day_max is not None and today + wanted > day_max:
            raise DaySpent(
                f"this key has {_left(day_max, today + reservation.before)} of its "
                f"{day_max} tokens a day left, and the request needs about "
                f"{reservation.tokens}; the day ends at midnight UTC",
                math.ceil(DAY - at % DAY),
            )

    def settle(self, reservation: Reservation, used: int | None, now: float) -> None:
        """Replace a reservation by the tokens ``used``; None: unknown."""
        self.reserved -= reservation.tokens
        if used is not None and self.tokens is not None:
            self.tokens.refill(now)
            self.tokens.take(used - reservation.tokens)

    def headers(self, now: float) -> Mapping[str, str]:
        """Return the limits per minute as OpenAI's headers."""
        written: dict[str, str] = {}
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is None:
                continue
            bucket.refill(now)
            written |= {
                f"x-ratelimit-limit-{what}": str(bucket.limit),
                f"x-ratelimit-remaining-{what}": str(max(0, math.floor(bucket.level))),
                f"x-ratelimit-reset-{what}": _duration(
                    bucket.seconds_until(bucket.limit)
                ),
            }
        return written


@dataclass(slots=True)
class KeyLimiters:
    """The limiters of the keys that have any limit, by key id."""

    _limiters: dict[str, KeyLimiter] = field(default_factory=dict)

    def of(self, key: Key, now: float) -> KeyLimiter | None:
        """Return a key's limiter, or None if it has no limit."""
        if key.quota == NO_QUOTA:
            return None
        if key.id not in self._limiters:
            self._limiters[key.id] = KeyLimiter.of(key.quota, now)
        return self._limiters[key.id]

    def retain(self, ids: Iterable[str]) -> None:
        """Forget all keys but those with these ids."""
        for id_ in self._limiters.keys() - set(ids):
            del self._limiters[id_]

    def forget(self, key: Key) -> None:
        """Forget a key."""
        self._limiters.pop(key.id, None)


def _left(limit: int, used: int) -> int:
    return max(0, limit - used)


def _duration(seconds: float) -> str:
    """Write a duration as Go does: 6m0s, 1s, 120ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


@dataclass(frozen=True, slots=True)
class _DetachedJob:
    work: Work
    limiter: KeyLimiter
    reservation: Reservation


@dataclass(slots=True)
class DetachedReservations:
    """The reservations of jobs without a client, held until the jobs end.

    ``now`` is the limiters' clock.
    """

    now: Callable[[], float]
    _held: dict[JobId, list[_DetachedJob]] = field(default_factory=dict)

    def hold(
        self, job_id: JobId, work: Work, limiter: KeyLimiter, reservation: Reservation
    ) -> None:
        """Hold a job's reservation until it ends."""
        self._held.setdefault(job_id, []).append(
            _DetachedJob(work, limiter, reservation)
        )

    def on_facts(self, batch: Sequence[Fact]) -> None:
        """Settle the reservations of jobs that have ended."""
        for fact in batch if self._held else ():
            if isinstance(fact, JOB_ENDS):
                self._settle(fact)

    def _settle(self, fact: JobEnd) -> None:
        for held in self._held.pop(fact.job_id, ()):
            used = None
            if isinstance(fact, JobCompleted):
                used = usage_of(held.work, fact.outcome).tokens
            held.limiter.settle(held.reservation, used, self.now())
