from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.credentials import DAY, Key, KeyUsage, Quota, Scope, digest_of
from shoal.domain.errors import BudgetSpent, DaySpent, InvalidRequest, RateLimited
from shoal.domain.facts import (
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFact,
    JobFailed,
    JobStarted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Chat
from shoal.gateway.http.quotas import (
    DetachedReservations,
    KeyLimiter,
    KeyLimiters,
    TokenBucket,
)

KEY = Key("key_1", "alice", digest_of("sk"), "", Scope.USE, 0.0)


def limiter(**limits: int) -> KeyLimiter:
    return KeyLimiter.of(Quota(**limits), 0.0)


def test_requests_may_burst_and_then_refill() -> None:
    limited = limiter(requests_per_minute=3)
    for _ in range(3):
        limited.reserve(10, 0.0)

    with pytest.raises(
        RateLimited, match="3 requests a minute: try again in 20 s"
    ) as e:
        limited.reserve(10, 0.0)

    assert e.value.retry_after == 20
    with pytest.raises(RateLimited):
        limited.reserve(10, 19.9)
    limited.reserve(10, 20.0)
    with pytest.raises(RateLimited):
        limited.reserve(10, 20.0)


def test_tokens_are_reserved_by_estimate_and_settled() -> None:
    limited = limiter(tokens_per_minute=1000)
    taken = limited.reserve(900, 0.0)
    with pytest.raises(RateLimited, match="1000 tokens a minute"):
        limited.reserve(200, 0.0)

    limited.settle(taken, 100, 0.0)

    limited.reserve(900, 0.0)


def test_longer_answer_delays_the_next_request() -> None:
    limited = limiter(tokens_per_minute=600)
    limited.settle(limited.reserve(100, 0.0), 1200, 0.0)

    with pytest.raises(RateLimited) as caught:
        limited.reserve(1, 0.0)

    assert caught.value.retry_after == 61


def test_answer_is_settled_with_what_has_accrued_until_then() -> None:
    limited = limiter(tokens_per_minute=100)

    limited.settle(limited.reserve(50, 0.0), 150, 60.0)

    assert limited.headers(60.0)["x-ratelimit-remaining-tokens"] == "0"


def test_request_without_usage_keeps_its_reservation() -> None:
    limited = limiter(tokens_per_minute=100)

    limited.settle(limited.reserve(100, 0.0), None, 0.0)

    with pytest.raises(RateLimited):
        limited.reserve(1, 0.0)


def test_rejected_request_uses_nothing() -> None:
    limited = limiter(requests_per_minute=1, tokens_per_minute=100)
    limited.settle(limited.reserve(100, 0.0), 100, 0.0)

    for _ in range(10):
        with pytest.raises(RateLimited):
            limited.reserve(100, 59.0)

    limited.reserve(100, 60.0)


def test_impossible_request_is_reported() -> None:
    with pytest.raises(
        InvalidRequest, match=r"about 101 tokens.*100 a minute"
    ) as caught:
        limiter(tokens_per_minute=100).reserve(101, 0.0)

    assert caught.value.field == "max_tokens"


def test_daily_budget_renews_at_midnight() -> None:
    limited = limiter(tokens_per_day=100)
    taken = limited.reserve(50, 0.0)

    limited.check_budget(taken, KeyUsage(9, 500, 500, 50), at=3 * DAY + 1.0)
    with pytest.raises(DaySpent, match="has 49 of its 100 tokens a day left") as caught:
        limited.check_budget(taken, KeyUsage(9, 500, 500, 51), at=4 * DAY - 100.0)

    assert caught.value.retry_after == 100


def test_total_budget_never_renews() -> None:
    limited = limiter(budget=1000)
    taken = limited.reserve(100, 0.0)

    limited.check_budget(taken, KeyUsage(1, 450, 450, 0), at=0.0)
    with pytest.raises(BudgetSpent, match=r"has 50 of its 1000 tokens left.*about 100"):
        limited.check_budget(taken, KeyUsage(1, 450, 500, 0), at=0.0)
    with pytest.raises(BudgetSpent, match=r"has 0 of its 1000 tokens left"):
        limited.check_budget(taken, KeyUsage(1, 500, 501, 0), at=0.0)


def test_concurrent_reservations_are_counted() -> None:
    limited = limiter(budget=1000)
    taken = [limited.reserve(300, 0.0) for _ in range(4)]

    for each in taken[:3]:
        limited.check_budget(each, KeyUsage(), at=0.0)
    with pytest.raises(BudgetSpent):
        limited.check_budget(taken[3], KeyUsage(), at=0.0)

    limited.settle(taken[3], 0, 0.0)
    limited.settle(taken[0], 300, 0.0)
    again = limited.reserve(100, 0.0)
    limited.check_budget(again, KeyUsage(1, 150, 150, 300), at=0.0)


def test_headers_follow_openai() -> None:
    limited = limiter(requests_per_minute=60, tokens_per_minute=600_000)
    limited.reserve(75_300, 0.0)

    assert limited.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600000",
        "x-ratelimit-remaining-tokens": "524700",
        "x-ratelimit-reset-tokens": "7.53s",
    }


@pytest.mark.parametrize(
    ("level", "reset"),
    [(60.0, "0ms"), (59.9, "100ms"), (0.0, "1m0s"), (-30.0, "1m30s"), (59.0, "1s")],
)
def test_reset_uses_go_durations(level: float, reset: str) -> None:
    limited = limiter(requests_per_minute=60)
    limited.requests = TokenBucket(60, level, 0.0)

    assert limited.headers(0.0)["x-ratelimit-reset-requests"] == reset
    remaining = int(limited.headers(0.0)["x-ratelimit-remaining-requests"])
    assert remaining == max(0, int(level))


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100)), min_size=1, max_size=200)
)
def test_usage_is_at_most_the_burst_plus_the_rate(
    asked: list[tuple[float, int]],
) -> None:
    limited, now, used = limiter(tokens_per_minute=100), 0.0, 0
    for pause, tokens in asked:
        now += pause
        with suppress(RateLimited):
            limited.reserve(tokens, now)
            used += tokens

    assert used <= 100 + 100 * now / 60 + 1e-6


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1e6))
def test_request_after_retry_after_is_accepted(
    limit: int, asked: int, now: float
) -> None:
    limited = KeyLimiter.of(Quota(tokens_per_minute=limit), now)
    asked = min(limit, asked)
    limited.reserve(limit, now)

    with pytest.raises(RateLimited) as caught:
        limited.reserve(asked, now)

    limited.reserve(asked, now + caught.value.retry_after)


def test_key_without_limits_has_no_limiter() -> None:
    assert KeyLimiters().of(KEY, 0.0) is None


def test_keys_have_separate_limits() -> None:
    known = KeyLimiters()
    one = replace(KEY, quota=Quota(requests_per_minute=1))
    other = replace(one, id="key_2")
    for key in (one, other):
        each = known.of(key, 0.0)
        assert each is not None
        each.reserve(1, 0.0)

    again = known.of(one, 0.0)
    assert again is not None
    with pytest.raises(RateLimited):
        again.reserve(1, 0.0)
    known.retain(["key_2"])  # the other's id
    fresh = known.of(one, 0.0)
    assert fresh is not None
    fresh.reserve(1, 0.0)

    known.forget(one)
    anew = known.of(one, 0.0)
    assert anew is not None
    anew.reserve(1, 0.0)


J, ONE = JobId("j"), LeaseNumber(1)


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (JobCompleted(J, ONE, Outcome("", usage=Usage(7, 3))), 90),
        (JobFailed(J, "boom"), 40),
        (JobCancelled(J, "left"), 40),
        (JobExpired(J, TimeLimit.TOTAL, ""), 40),
    ],
)
def test_reservation_of_a_client_that_left_is_settled_at_the_end_of_its_job(
    end: JobFact, left: int
) -> None:
    limited, held = limiter(tokens_per_minute=100), DetachedReservations(lambda: 0.0)
    held.hold(J, Chat("m", ()), limited, limited.reserve(60, 0.0))

    held.on_facts([JobStarted(J, ONE)])
    held.on_facts([JobFailed(JobId("other"), "")])
    assert limited.reserved == 60

    for _ in range(2):  # once is enough
        held.on_facts([end])
        assert limited.reserved == 0
        assert limited.headers(0.0)["x-ratelimit-remaining-tokens"] == str(left)
