"""Conversion of values between JSON and MessagePack."""

import datetime

import msgspec
import pytest

from protocols.calling import packed
from shoal.domain.work import JSON, Task
from shoal.protocols.macfleet.codec.values import (
    RUN_STEPS_JSON,
    NotConvertible,
    is_plain_value,
    task_arguments,
    to_json,
)

STEPS_MAX = 500  # instead of 2**18


@pytest.mark.parametrize(
    ("payload", "args", "kwargs"),
    [
        ({"task_type": "f", "args": [1], "kwargs": {"a": 2}}, [1], {"a": 2}),
        ({"task_type": "f", "args": [1]}, [1], {}),
        ({"task_type": "f", "x": 1, "name": "n"}, [], {"x": 1, "name": "n"}),
        (None, [], {}),
        ([1, 2], [[1, 2]], {}),
    ],
)
def test_fields_of_a_payload_are_arguments(
    payload: JSON, args: object, kwargs: object
) -> None:
    assert task_arguments(Task("f", payload)) == (packed(args), packed(kwargs))


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"args": 1}, "payload.args"),
        ({"kwargs": [1]}, "payload.kwargs"),
        ({"args": [2**70]}, "payload"),
    ],
)
def test_invalid_arguments_are_named(payload: JSON, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        task_arguments(Task("f", payload))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (packed([1, "é", b"\xc7\x01", 1.5, None]), True),
        (packed(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)), True),
        (packed([msgspec.msgpack.Ext(1, b"x")]), False),
        (packed({"a": [msgspec.msgpack.Ext(2, bytes(32))]}), False),
        (b"\xc7", True),  # not a valid value
    ],
)
def test_values_without_extensions_are_plain(value: bytes, plain: bool) -> None:
    assert is_plain_value(value) is plain


def test_convertible_values_become_json() -> None:
    assert to_json(packed({"a": [1, 1.5, None, "é"]})) == '{"a": [1, 1.5, null, "é"]}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (packed([b"x"]), "bytes"),
        (packed(float("nan")), "float"),
        (packed(msgspec.msgpack.Ext(1, b"x")), "array"),
        (b"\xc1", "JSON"),
    ],
)
def test_values_without_a_json_form_are_named(value: bytes, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        to_json(value)


@pytest.mark.parametrize(
    "value",
    [
        ["x"] * (STEPS_MAX + 1),
        [{"x": 1}] * STEPS_MAX,
        [1] * STEPS_MAX * (RUN_STEPS_JSON + 1),
    ],
    ids=["texts", "mappings", "numbers"],
)
def test_too_many_values_have_no_json_form(
    value: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.codec.values.STEPS_MAX", STEPS_MAX)

    with pytest.raises(NotConvertible, match=f"more than {STEPS_MAX} values"):
        to_json(packed(value))
