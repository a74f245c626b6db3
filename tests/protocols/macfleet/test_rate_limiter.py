import pytest

from protocols.macfleet.fleet_members import AWAY, LOCAL, OtherGuesses, limiter
from protocols.macfleet.recorded import Case, recorded
from shoal.protocols.macfleet.rate_limiter import (
    BAN_DURATION,
    BANNED_AFTER,
    LOCAL_DELAY_MAX,
    PENDING_MAX,
    PENDING_TIMEOUT,
    FleetRateLimiter,
)
from shoal.protocols.seam.admission import NoThrottle


def fail(
    limits: FleetRateLimiter, times: int, now: float = 0.0, address: str = AWAY
) -> None:
    for _ in range(times):
        limits.on_failure(address, now)


@recorded("rate_limiter")
def test_delays_and_bans_equal_those_of_upstream(case: Case) -> None:
    expected = case["expect"]
    assert case["input"] == {
        "base": 0.5,
        "max_failures": BANNED_AFTER,
        "ban_s": BAN_DURATION,
    }
    for step in expected["steps"]:
        limits = limiter()
        fail(limits, step["failures"])
        assert limits.is_banned(AWAY, 0.0) == step["banned"]
        # Rejected connections are not pending.
        delay = None if step["banned"] else step["delay"]
        assert limits.delay(AWAY, 0.0) == delay

    limits = limiter()
    fail(limits, BANNED_AFTER)
    assert limits.is_banned(AWAY, BAN_DURATION) == expected["banned_at_exactly_300s"]
    late = BAN_DURATION + 0.001
    assert limits.is_banned(AWAY, late) == expected["banned_after_300s"]
    assert limits.delay(AWAY, late) == expected["delay_after_expiry"]

    limits = limiter()
    fail(limits, BANNED_AFTER - 1)
    limits.on_success(AWAY, 0.0)
    assert limits.delay(AWAY, 0.0) == expected["delay_after_success"]


def test_a_ban_counts_from_the_last_failure() -> None:
    limits = limiter()
    fail(limits, BANNED_AFTER)
    limits.on_failure(AWAY, 200.0)

    assert limits.is_banned(AWAY, 200.0 + BAN_DURATION)
    assert not limits.is_banned(AWAY, 201.0 + BAN_DURATION)


def test_parallel_connections_of_a_failed_address_count_as_failures() -> None:
    limits = limiter()
    fail(limits, 1)

    delays = [limits.delay(AWAY, 0.0) for _ in range(6)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_finished_connection_is_not_pending() -> None:
    limits = limiter()
    fail(limits, 1)
    limits.delay(AWAY, 0.0)
    limits.on_abandoned(AWAY, 0.0)
    limits.delay(AWAY, 0.0)
    limits.failed(AWAY, 0.0)

    assert limits.delay(AWAY, 0.0) == 0.5


def test_honest_nodes_that_share_an_address_are_not_delayed() -> None:
    limits = limiter()

    assert {limits.delay(AWAY, 0.0) for _ in range(100)} == {0.0}


def test_a_pending_connection_expires() -> None:
    limits = limiter()
    fail(limits, 1)
    limits.delay(AWAY, 0.0)

    assert limits.delay(AWAY, PENDING_TIMEOUT + 1.0) == 0.5


def test_loopback_addresses_are_banned_like_others() -> None:
    limits = limiter()
    fail(limits, BANNED_AFTER - 1, address=LOCAL)
    assert limits.delay(LOCAL, 0.0) == 4.0

    fail(limits, 1, address=LOCAL)

    assert limits.is_banned(LOCAL, 0.0)
    assert limits.delay(LOCAL, 0.0) is None


def test_spared_loopback_addresses_are_delayed_and_never_banned() -> None:
    limits = FleetRateLimiter(NoThrottle(), spares_loopback=True)
    fail(limits, 100, address=LOCAL)
    fail(limits, 100)

    assert limits.delay(LOCAL, 0.0) == LOCAL_DELAY_MAX
    assert not limits.is_banned(LOCAL, 0.0)
    assert limits.is_banned(AWAY, 0.0)


def test_bans_and_failures_are_shared_with_other_protocols() -> None:
    others = OtherGuesses()
    limits = FleetRateLimiter(others)
    others.barred.add(AWAY)

    assert limits.is_banned(AWAY, 0.0)
    assert limits.delay(AWAY, 0.0) is None

    limits.on_failure("192.0.2.8", 0.0)
    assert others.counted == ["192.0.2.8"]


@pytest.mark.parametrize("address", ["2001:db8::{:x}", "2001:db8:0:{:x}::1"])
def test_an_ipv6_network_is_banned_as_a_whole(address: str) -> None:
    limits = limiter()
    for number in range(BANNED_AFTER):
        limits.on_failure(address.format(number), 0.0)

    assert limits.is_banned("2001:db8::ffff", 0.0)
    assert not limits.is_banned("2001:db8:1::1", 0.0)


def test_memory_is_bounded_and_the_oldest_failure_is_evicted_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.rate_limiter.ADDRESSES_MAX", 100)
    limits = limiter()
    for number in range(100 + 10):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        limits.delay(address, 0.0)
        limits.delay(address, 0.0)
        fail(limits, BANNED_AFTER, address=address)

    assert len(limits._records) == 100
    assert len(limits._pending) <= 100
    assert not limits.is_banned("10.0.0.1", 0.0)
    assert limits.is_banned(address, 0.0)
    for _ in range(2 * PENDING_MAX):
        limits.delay(AWAY, 0.0)
    assert len(limits._pending[AWAY]) == PENDING_MAX
