"""How much a key may use: a bucket for each minute's limit, and a budget.

All of it is arithmetic, told the time in monotonic seconds; nothing is stored here, so
that the limits by the minute begin anew when the program starts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.domain.credentials import DAY, Key, Quota, Used
from shoal.domain.errors import BudgetSpent, DaySpent, InvalidRequest, RateLimited

MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # seconds: what arithmetic loses is nobody's to wait for


@dataclass(slots=True)
class Bucket:
    """A token bucket: holds what may be used in a minute, and fills in a minute.

    ``limit`` is 1 or more.  It is overdrawn when more was used than was taken for it.
    """

    limit: int
    level: float
    at: float

    @classmethod
    def full(cls, limit: int, now: float) -> "Bucket":
        return cls(limit, limit, now)

    def fill(self, now: float) -> None:
        """Add what has come since it was looked at last."""
        passed = max(0.0, now - self.at)
        self.level = min(self.limit, self.level + self.limit * passed / MINUTE)
        self.at = now

    def wait(self, amount: float) -> float:
        """Return in how many seconds ``amount`` is there, if it fits."""
        return max(0.0, amount - self.level) * MINUTE / self.limit

    def take(self, amount: float) -> None:
        """Take ``amount``, or give it back if it is negative."""
        self.level = min(self.limit, self.level - amount)


@dataclass(slots=True)
class Taken:
    """What a request has taken beforehand.

    ``others`` is what other requests of the key that had not ended had taken before.
    """

    tokens: int
    others: int


@dataclass(slots=True)
class Allowance:
    """What one key may use now."""

    quota: Quota
    requests: Bucket | None
    tokens: Bucket | None
    open: int = 0  # tokens taken by requests that have not ended

    @classmethod
    def of(cls, quota: Quota, now: float) -> "Allowance":
        by_request, by_token = quota.requests_per_minute, quota.tokens_per_minute
        return cls(
            quota,
            None if by_request is None else Bucket.full(by_request, now),
            None if by_token is None else Bucket.full(by_token, now),
        )

    def enter(self, tokens: int, now: float) -> Taken:
        """Take one request and about as many tokens, both or neither.

        Raises RateLimited, or InvalidRequest for more tokens than there ever are.
        """
        for bucket, amount, what in (
            (self.requests, 1, "requests"),
            (self.tokens, tokens, "tokens"),
        ):
            if bucket is None:
                continue
            bucket.fill(now)
            if amount > bucket.limit:
                raise InvalidRequest(
                    f"the request takes about {amount} tokens, and this key may use "
                    f"{bucket.limit} a minute: ask for fewer with max_tokens, or "
                    "shorten the messages",
                    "max_tokens",
                )
            if (wait := bucket.wait(amount)) > ROUNDING:
                seconds = math.ceil(wait)
                raise RateLimited(
                    f"this key may use {bucket.limit} {what} a minute: try again in "
                    f"{seconds} s",
                    seconds,
                )
        taken = Taken(tokens, self.open)
        self.open += tokens
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)
        return taken

    def check_budget(self, taken: Taken, used: Used, at: float) -> None:
        """Raise DaySpent or BudgetSpent if what is left is less than was taken.

        ``used`` is what the store has, ``at`` the time in Unix seconds.  A request that
        ends while the store is read may count twice, and none is ever left out.
        """
        wanted = taken.others + taken.tokens
        in_all, today = used.tokens, used.tokens_today
        if (budget := self.quota.budget) is not None and in_all + wanted > budget:
            raise BudgetSpent(
                f"this key has {_left(budget, in_all + taken.others)} of its {budget} "
                f"tokens left, and the request takes about {taken.tokens}"
            )
        day_max = self.quota.tokens_per_day
        if day_max is not None and today + wanted > day_max:
            raise DaySpent(
                f"this key has {_left(day_max, today + taken.others)} of its {day_max} "
                f"tokens a day left, and the request takes about {taken.tokens}; the "
                "day ends at midnight UTC",
                math.ceil(DAY - at % DAY),
            )

    def leave(self, taken: Taken, used: int | None, now: float) -> None:
        """Correct what was taken by what was used; None: nobody knows."""
        self.open -= taken.tokens
        if used is not None and self.tokens is not None:
            self.tokens.fill(now)
            self.tokens.take(used - taken.tokens)

    def headers(self, now: float) -> Mapping[str, str]:
        """Return the limits by the minute as OpenAI writes them."""
        written: dict[str, str] = {}
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is None:
                continue
            bucket.fill(now)
            written |= {
                f"x-ratelimit-limit-{what}": str(bucket.limit),
                f"x-ratelimit-remaining-{what}": str(max(0, math.floor(bucket.level))),
                f"x-ratelimit-reset-{what}": _duration(bucket.wait(bucket.limit)),
            }
        return written


@dataclass(slots=True)
class Allowances:
    """The allowances of the keys that have any limit, by their ids."""

    _known: dict[str, Allowance] = field(default_factory=dict)

    def of(self, key: Key, now: float) -> Allowance | None:
        """Return a key's allowance, or None if it has no limit."""
        if key.quota == Quota():
            return None
        if key.id not in self._known:
            self._known[key.id] = Allowance.of(key.quota, now)
        return self._known[key.id]

    def keep(self, ids: Iterable[str]) -> None:
        """Forget all keys but those with these ids."""
        there = set(ids)
        for id_ in self._known.keys() - there:
            del self._known[id_]

    def forget(self, key: Key) -> None:
        """Forget a key that has ended."""
        self._known.pop(key.id, None)


def _left(limit: int, used: int) -> int:
    return max(0, limit - used)


def _duration(seconds: float) -> str:
    """Write a duration as Go does: 6m0s, 1s, 120ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
