from itertools import pairwise

import pytest

from shoal.coordinator.auth_throttle import (
    ADDRESSES_MAX,
    BLOCK_AFTER,
    BLOCK_SECONDS,
    DELAY,
    DELAY_AFTER,
    WINDOW,
    AuthThrottle,
)
from shoal.domain.errors import TooManyFailures

AWAY = "192.0.2.7"


def fail(
    failures: AuthThrottle, address: str, times: int, now: float = 0.0
) -> list[float]:
    return [failures.record_failure(address, now) for _ in range(times)]


def test_first_failures_are_free_and_later_ones_delay() -> None:
    waits = fail(AuthThrottle(), AWAY, BLOCK_AFTER - 1)

    assert waits == [0.0] * DELAY_AFTER + [DELAY] * (BLOCK_AFTER - 1 - DELAY_AFTER)
    assert all(one <= other for one, other in pairwise(waits))


def test_persistent_address_is_banned_for_a_while() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    with pytest.raises(TooManyFailures, match="try again in 60 s") as caught:
        failures.check(AWAY, 0.0)
    assert caught.value.retry_after == BLOCK_SECONDS
    with pytest.raises(TooManyFailures, match="try again in 1 s"):
        failures.check(AWAY, BLOCK_SECONDS - 0.5)
    failures.check(AWAY, BLOCK_SECONDS)
    failures.check("192.0.2.8", 0.0)


def test_failures_long_ago_are_forgiven() -> None:
    failures = AuthThrottle()

    for minute in range(10):
        fail(failures, AWAY, BLOCK_AFTER - 1, minute * WINDOW)

    failures.check(AWAY, 9 * WINDOW)


def test_attempts_do_not_extend_a_ban() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    for second in range(59):
        with pytest.raises(TooManyFailures):
            failures.record_failure(AWAY, float(second))

    failures.check(AWAY, BLOCK_SECONDS)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "127.3.2.1", "::ffff:127.0.0.1"]
)
def test_loopback_may_always_present_a_valid_key(address: str) -> None:
    failures = AuthThrottle()
    fail(failures, address, BLOCK_AFTER)

    failures.check(address, 0.0)
    with pytest.raises(TooManyFailures):
        failures.record_failure(address, 0.0)


def test_ipv6_network_counts_as_one_address() -> None:
    failures = AuthThrottle()

    for number in range(BLOCK_AFTER):
        failures.record_failure(f"2001:db8:0:1::{number:x}", 0.0)

    with pytest.raises(TooManyFailures):
        failures.check("2001:db8:0:1:ffff::1", 0.0)
    failures.check("2001:db8:0:2::1", 0.0)


def test_mapped_ipv4_address_counts_as_ipv4() -> None:
    failures = AuthThrottle()
    fail(failures, f"::ffff:{AWAY}", BLOCK_AFTER)

    with pytest.raises(TooManyFailures):
        failures.check(AWAY, 0.0)


def test_memory_is_bounded() -> None:
    failures = AuthThrottle()
    fail(failures, AWAY, BLOCK_AFTER)

    for number in range(ADDRESSES_MAX + 10):
        failures.record_failure(
            f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1.0
        )

    assert len(failures._records) == ADDRESSES_MAX
