"""The values that Python's msgpack can decode."""

from datetime import UTC, datetime
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.protocols.macfleet.codec.values import (
    DEPTH_MAX,
    RUN_FIRST,
    RUN_GROWTH,
    RUN_MAX,
    RUN_STEPS,
    IncompatibleValue,
    check_compatible,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300))
)
keys = st.text() | st.binary() | st.integers(0, 9)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(keys, inner),
    max_leaves=60,
)


def is_read(data: bytes) -> bool:
    """Say whether upstream can decode a value."""
    try:
        msgpack.unpackb(data, strict_map_key=True, raw=False)
    except (ValueError, msgpack.UnpackException):
        return False
    return True


def is_passed(data: bytes) -> bool:
    try:
        msgspec.msgpack.decode(data, type=msgspec.Raw)  # exactly one value
        check_compatible(memoryview(data))
    except (IncompatibleValue, msgspec.MsgspecError):
        return False
    return True


@settings(max_examples=examples(0.4))
@given(values)
def test_values_that_upstream_decodes_pass(value: Any) -> None:
    data: bytes = msgpack.packb(value)

    assert is_passed(data) == is_read(data)


@settings(max_examples=examples(0.4))
@given(values, st.data())
def test_corrupted_values_pass_only_if_upstream_decodes_them(
    value: Any, data: st.DataObject
) -> None:
    damaged = bytearray(msgpack.packb(value))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.integers(0, 255))

    assert is_read(bytes(damaged)) or not is_passed(bytes(damaged))


@pytest.mark.parametrize(
    "value",
    [
        [*range(-20, 300), *range(2**16 - 20, 2**16 + 20), 2**40, -(2**40)],
        [0.5] * 100_000,
        {"a": [1.5] * 70_000, "b" * 300: b"\x81" * 70_000, "c" * 70_000: None},
        [datetime(2026, 1, 1, tzinfo=UTC), datetime(2600, 1, 1, tzinfo=UTC)],
        [[[], {}], {"": {}}] * 2_000,
        {str(number): number for number in range(70_000)},
    ],
)
def test_every_encoding_of_values_is_checked(value: Any) -> None:
    check_compatible(memoryview(msgpack.packb(value, datetime=True)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x81\x01\x02", "neither text nor bytes"),
        (b"\x92\x01\x81\xa1a\x81\xc0\x01", "neither text nor bytes"),
        (b"\xa2\xc3\x28", "UTF-8"),
        (b"\xd9\x01\xff", "UTF-8"),
        (b"\x81\xa1\xff\x01", "UTF-8"),
        (b"\xc7\x05\xff12345", "imestamp"),
        (b"\xd5\xff12", "imestamp"),
        (b"\x91" * (DEPTH_MAX + 1) + b"\x01", "nested"),
    ],
)
def test_values_that_upstream_cannot_decode_are_incompatible(
    data: bytes, reason: str
) -> None:
    assert not is_read(data) or reason == "nested"
    with pytest.raises(IncompatibleValue, match=reason):
        check_compatible(memoryview(data))


def test_the_deepest_value_that_upstream_encodes_passes() -> None:
    check_compatible(memoryview(b"\x91" * DEPTH_MAX + b"\x01"))


def test_runs_of_numbers_are_read_to_their_end() -> None:
    second = RUN_FIRST * (1 + RUN_GROWTH)
    for size in (RUN_FIRST, second, RUN_MAX, 2 * RUN_MAX):
        check_run(size - 1)
        check_run(size)
        check_run(size + 1)


def check_run(count: int) -> None:
    """Check that a text after so many numbers is checked."""
    numbers = msgpack.packb([1.5] * count + ["x", *range(20)] + [1] * count)
    check_compatible(memoryview(numbers))

    with pytest.raises(IncompatibleValue, match="UTF-8"):
        check_compatible(memoryview(numbers.replace(b"\xa1x", b"\xa1\xff")))


@pytest.fixture
def steps_max(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lower the limit of values, from 2**18."""
    monkeypatch.setattr("shoal.protocols.macfleet.codec.values.STEPS_MAX", 500)
    return 500


def test_too_many_numbers_are_incompatible(steps_max: int) -> None:
    count = 2 * steps_max * RUN_STEPS
    numbers = b"\xdd" + count.to_bytes(4) + b"\xc0" * count

    with pytest.raises(IncompatibleValue, match=f"more than {steps_max} values"):
        check_compatible(memoryview(numbers))


def test_too_many_values_are_incompatible(steps_max: int) -> None:
    data = b"\xdd" + (steps_max + 2).to_bytes(4) + b"\xa0" * (steps_max + 2)

    with pytest.raises(IncompatibleValue, match=f"more than {steps_max} values"):
        check_compatible(memoryview(data))
