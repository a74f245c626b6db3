from itertools import pairwise

import pytest

from shoal.coordinator.auth_throttle import (
    BLOCK_AFTER,
    BLOCK_SECONDS,
    CODE_FAILURES_MAX,
    CODE_WINDOW,
    CODES_MAX,
    DELAY,
    DELAY_AFTER,
    FAILURES_MAX,
    KIND_FAILURES_MAX,
    WINDOW,
    AuthThrottle,
    CredentialKind,
)
from shoal.domain.errors import TooManyFailures

AWAY = "192.0.2.7"
KEY = CredentialKind.API_KEY
CODE = CredentialKind.PAIRING_CODE
STRONG = "sk-shoal-f85c0bfd0c9658e7b1baab8e5fe289e4"
WEAK = "hunter2"


def fail(
    failures: AuthThrottle, address: str, times: int, now: float = 0.0
) -> list[float]:
    return [failures.record_failure(KEY, address, now) for _ in range(times)]


def test_first_failures_are_free_and_later_ones_delay() -> None:
    waits = fail(AuthThrottle(), AWAY, BLOCK_AFTER - 1)

    assert waits == [0.0] * DELAY_AFTER + [DELAY] * (BLOCK_AFTER - 1 - DELAY_AFTER)
    assert all(one <= other for one, other in pairwise(waits))


def test_persistent_address_is_banned_for_a_while() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    with pytest.raises(TooManyFailures, match="try again in 60 s") as caught:
        failures.check(KEY, AWAY, 0.0)
    assert caught.value.retry_after == BLOCK_SECONDS
    with pytest.raises(TooManyFailures, match="try again in 1 s"):
        failures.check(KEY, AWAY, BLOCK_SECONDS - 0.5)
    failures.check(KEY, AWAY, BLOCK_SECONDS)
    failures.check(KEY, "192.0.2.8", 0.0)


def test_failures_long_ago_are_forgiven() -> None:
    failures = AuthThrottle()

    for minute in range(10):
        fail(failures, AWAY, BLOCK_AFTER - 1, minute * WINDOW)

    failures.check(KEY, AWAY, 9 * WINDOW)


def test_attempts_do_not_extend_a_ban() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    for second in range(59):
        with pytest.raises(TooManyFailures):
            failures.record_failure(KEY, AWAY, float(second))

    failures.check(KEY, AWAY, BLOCK_SECONDS)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "127.3.2.1", "::ffff:127.0.0.1"]
)
def test_loopback_may_present_what_nobody_can_guess(address: str) -> None:
    failures = AuthThrottle()
    fail(failures, address, BLOCK_AFTER)

    failures.check(KEY, address, 0.0)
    failures.check(KEY, address, 0.0, STRONG)
    with pytest.raises(TooManyFailures):
        failures.check(KEY, address, 0.0, WEAK)
    with pytest.raises(TooManyFailures):
        failures.record_failure(KEY, address, 0.0)


def test_blocked_address_elsewhere_may_present_nothing() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    for secret in (None, STRONG, WEAK):
        with pytest.raises(TooManyFailures, match="wrong API keys from this address"):
            failures.check(KEY, AWAY, 0.0, secret)


def test_kinds_of_secrets_are_counted_apart() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    failures.check(CODE, AWAY, 0.0, WEAK)
    assert failures.record_failure(CODE, AWAY, 0.0) == 0.0


def test_guesses_of_a_kind_are_limited_from_all_addresses_together() -> None:
    failures = AuthThrottle()
    for number in range(KIND_FAILURES_MAX):
        failures.check(KEY, AWAY, 1.0, WEAK)
        failures.record_failure(KEY, f"10.0.0.{number}", 1.0)

    with pytest.raises(TooManyFailures, match="wrong API keys: try again in 60 s"):
        failures.check(KEY, AWAY, 1.0, WEAK)
    failures.check(KEY, AWAY, 1.0, STRONG)
    failures.check(KEY, AWAY, 1.0)
    failures.check(CODE, AWAY, 1.0, WEAK)
    failures.check(KEY, AWAY, 1.0 + WINDOW, WEAK)


def test_guesses_of_all_kinds_are_limited_together() -> None:
    failures = AuthThrottle()
    kinds = list(CredentialKind)[:-1]
    assert len(kinds) * KIND_FAILURES_MAX > FAILURES_MAX
    for number in range(FAILURES_MAX):
        failures.check(CODE, AWAY, 1.0, WEAK)
        kind = kinds[number % len(kinds)]
        failures.record_failure(kind, f"10.0.0.{number}", 1.0)

    with pytest.raises(TooManyFailures, match="wrong pairing codes: try again in 60"):
        failures.check(CODE, AWAY, 1.0, WEAK)
    failures.check(CODE, AWAY, 1.0 + WINDOW, WEAK)


def test_wrong_codes_that_begin_alike_have_a_budget() -> None:
    failures = AuthThrottle()
    for _ in range(CODE_FAILURES_MAX):
        failures.check_code("3FA91", 1.0)
        failures.record_code_failure("3FA91", 1.0)

    with pytest.raises(TooManyFailures, match="begin like this one: try again in 3600"):
        failures.check_code("3FA91", 1.0)
    failures.check_code("3FA92", 1.0)
    with pytest.raises(TooManyFailures, match="try again in 1 s"):
        failures.check_code("3FA91", 0.5 + CODE_WINDOW)
    failures.check_code("3FA91", 1.0 + CODE_WINDOW)
    failures.record_code_failure("3FA91", 1.0 + CODE_WINDOW)
    failures.check_code("3FA91", 1.0 + CODE_WINDOW)


def test_memory_of_codes_is_bounded() -> None:
    failures = AuthThrottle()

    for number in range(CODES_MAX + 10):
        failures.record_code_failure(f"{number:05X}", 0.0)

    assert len(failures._codes) == CODES_MAX
    for _ in range(CODE_FAILURES_MAX):  # it is counted all the same
        failures.record_code_failure("new", 0.0)
    with pytest.raises(TooManyFailures):
        failures.check_code("new", 0.0)


def test_ipv6_network_counts_as_one_address() -> None:
    failures = AuthThrottle()

    for number in range(BLOCK_AFTER):
        failures.record_failure(KEY, f"2001:db8:0:{number:x}::1", 0.0)

    with pytest.raises(TooManyFailures):
        failures.check(KEY, "2001:db8:0:ffff::1", 0.0)
    failures.check(KEY, "2001:db8:1::1", 0.0)


def test_mapped_ipv4_address_counts_as_ipv4() -> None:
    failures = AuthThrottle()
    fail(failures, f"::ffff:{AWAY}", BLOCK_AFTER)

    with pytest.raises(TooManyFailures):
        failures.check(KEY, AWAY, 0.0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.auth_throttle.ADDRESSES_MAX", 100)
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    for number in range(100 + 10):
        failures.record_failure(
            KEY, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1.0
        )

    assert len(failures._records) == 100
    fail(failures, AWAY, BLOCK_AFTER, 2.0)  # it is counted all the same
    with pytest.raises(TooManyFailures):
        failures.check(KEY, AWAY, 2.0)
