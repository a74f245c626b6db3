"""Rate limits and token budgets of API keys, also for jobs that outlive their request.

All of it is arithmetic on monotonic seconds.  Nothing is stored here: limits per minute
start anew when the program starts.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.domain.credentials import DAY, Key, KeyUsage, Quota, usage_of
from shoal.domain.errors import BudgetSpent, DaySpent, InvalidRequest, RateLimited
from shoal.domain.facts import Fact, JobCancelled, JobCompleted, JobExpired, JobFailed
from shoal.domain.ids import JobId
from shoal.domain.work import Work

MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # seconds: what arithmetic loses is nobody's to wait for


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: holds what may be used in a minute, and fills in a minute.

    ``limit`` is 1 or more.  It is overdrawn when more was used than was taken for it.
    """

    limit: int
    level: float
    at: float

    @classmethod
    def full(cls, limit: int, now: float) -> "TokenBucket":
        return cls(limit, limit, now)

    def refill(self, now: float) -> None:
        """Add what has come since it was looked at last."""
        passed = max(0.0, now - self.at)
        self.level = min(self.limit, self.level + self.limit * passed / MINUTE)
        self.at = now

    def seconds_until(self, amount: float) -> float:
        """Return in how many seconds ``amount`` is there, if it fits."""
        return max(0.0, amount - self.level) * MINUTE / self.limit

    def take(self, amount: float) -> None:
        """Take ``amount``, or give it back if it is negative."""
        self.level = min(self.limit, self.level - amount)


@dataclass(slots=True)
class Reservation:
    """What a request has taken beforehand.

    ``before`` is what other requests of the key that had not ended had taken before.
    """

    tokens: int
    before: int


@dataclass(slots=True)
class KeyLimiter:
    """What one key may use now."""

    quota: Quota
    requests: TokenBucket | None
    tokens: TokenBucket | None
    reserved: int = 0  # tokens taken by requests that have not ended

    @classmethod
    def of(cls, quota: Quota, now: float) -> "KeyLimiter":
        by_request, by_token = quota.requests_per_minute, quota.tokens_per_minute
        return cls(
            quota,
            None if by_request is None else TokenBucket.full(by_request, now),
            None if by_token is None else TokenBucket.full(by_token, now),
        )

    def reserve(self, tokens: int, now: float) -> Reservation:
        """Take one request and about as many tokens, both or neither.

        Raises RateLimited, or InvalidRequest for more tokens than there ever are.
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
                    f"the request takes about {amount} tokens, and this key may use "
                    f"{bucket.limit} a minute: ask for fewer with max_tokens, or "
                    "shorten the messages",
                    "max_tokens",
                )
            if (wait := bucket.seconds_until(amount)) > ROUNDING:
                seconds = math.ceil(wait)
                raise RateLimited(
                    f"this key may use {bucket.limit} {what} a minute: try again in "
                    f"{seconds} s",
                    seconds,
                )
        taken = Reservation(tokens, self.reserved)
        self.reserved += tokens
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)
        return taken

    def check_budget(self, taken: Reservation, used: KeyUsage, at: float) -> None:
        """Raise DaySpent or BudgetSpent if what is left is less than was taken.

        ``used`` is what the store has, ``at`` the time in Unix seconds.  A request that
        ends while the store is read may count twice, and none is ever left out.
        """
        wanted = taken.before + taken.tokens
        in_all, today = used.tokens, used.tokens_today
        if (budget := self.quota.budget) is not None and in_all + wanted > budget:
            raise BudgetSpent(
                f"this key has {_left(budget, in_all + taken.before)} of its {budget} "
                f"tokens left, and the request takes about {taken.tokens}"
            )
        day_max = self.quota.tokens_per_day
        if day_max is not None and today + wanted > day_max:
            raise DaySpent(
                f"this key has {_left(day_max, today + taken.before)} of its {day_max} "
                f"tokens a day left, and the request takes about {taken.tokens}; the "
                "day ends at midnight UTC",
                math.ceil(DAY - at % DAY),
            )

    def settle(self, taken: Reservation, used: int | None, now: float) -> None:
        """Correct what was taken by what was used; None: nobody knows."""
        self.reserved -= taken.tokens
        if used is not None and self.tokens is not None:
            self.tokens.refill(now)
            self.tokens.take(used - taken.tokens)

    def headers(self, now: float) -> Mapping[str, str]:
        """Return the limits by the minute as OpenAI writes them."""
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
    """The allowances of the keys that have any limit, by their ids."""

    _limiters: dict[str, KeyLimiter] = field(default_factory=dict)

    def of(self, key: Key, now: float) -> KeyLimiter | None:
        """Return a key's allowance, or None if it has no limit."""
        if key.quota == Quota():
            return None
        if key.id not in self._limiters:
            self._limiters[key.id] = KeyLimiter.of(key.quota, now)
        return self._limiters[key.id]

    def retain(self, ids: Iterable[str]) -> None:
        """Forget all keys but those with these ids."""
        there = set(ids)
        for id_ in self._limiters.keys() - there:
            del self._limiters[id_]

    def forget(self, key: Key) -> None:
        """Forget a key that has ended."""
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
    """As many as there are open jobs: else a budget would hold for nobody who leaves.

    ``now`` is the clock that allowances go by.
    """

    now: Callable[[], float]
    _held: dict[JobId, list[_DetachedJob]] = field(default_factory=dict)

    def hold(
        self, job_id: JobId, work: Work, allowance: KeyLimiter, taken: Reservation
    ) -> None:
        """Keep what was taken for a job until it ends."""
        self._held.setdefault(job_id, []).append(_DetachedJob(work, allowance, taken))

    def on_fact(self, fact: Fact) -> None:
        """Let go of what a job held that has ended."""
        match fact:
            case JobCompleted(job_id, _, outcome):
                for held in self._held.pop(job_id, ()):
                    usage = usage_of(held.work, outcome)
                    used = usage.prompt_tokens + usage.completion_tokens
                    held.limiter.settle(held.reservation, used, self.now())
            case JobFailed(job_id) | JobCancelled(job_id) | JobExpired(job_id):
                for held in self._held.pop(job_id, ()):
                    held.limiter.settle(held.reservation, None, self.now())
            case _:
                pass  # no end of a job
