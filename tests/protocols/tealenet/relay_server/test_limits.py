import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.protocols.tealenet.relay_server.limits import Rate, RateBucket

RATE = Rate(per_second=10, burst=100)


def test_charges_beyond_the_burst_have_to_wait() -> None:
    bucket = RateBucket.full(RATE, 0.0)

    assert bucket.charge(100, 0.0) == 0
    assert bucket.charge(20, 0.0) == 2.0
    assert bucket.charge(0, 1.0) == 1.0
    assert bucket.charge(0, 2.0) == 0


def test_a_refused_charge_costs_nothing() -> None:
    bucket = RateBucket.full(Rate(per_second=1, burst=1), 0.0)

    assert bucket.try_charge_one(0.0) == 0
    assert [bucket.try_charge_one(0.5) for _ in range(5)] == [0.5] * 5
    assert bucket.try_charge_one(1.0) == 0


@settings(max_examples=examples(0.4))
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200))))
def test_charges_never_exceed_the_burst_and_the_rate(
    steps: list[tuple[float, int]],
) -> None:
    bucket, now, taken = RateBucket.full(RATE, 0.0), 0.0, 0

    for pause, amount in steps:
        now += pause
        wait = bucket.charge(amount, now)
        taken += amount
        now += wait

        allowed = RATE.burst + RATE.per_second * now
        assert taken <= allowed + 1e-6 * max(allowed, 1)
        assert wait == pytest.approx(max(0, -bucket.level / RATE.per_second))
