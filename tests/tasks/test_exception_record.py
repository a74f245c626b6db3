"""Records of exceptions: what they hold, and their limits."""

import pytest

from shoal.tasks.exception_record import (
    ExceptionRecord,
    decode_exception,
    encode_exception,
)
from shoal.tasks.limits import EXCEPTION_MAX
from shoal.tasks.values import ValueReader


class OddError(Exception):
    """An exception with attributes and methods that fail."""

    def __init__(self, **fields: object) -> None:
        super().__init__("odd")
        vars(self).update(fields)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def record_of(error: BaseException, *, pickles: bool = False) -> ExceptionRecord:
    record = decode_exception(encode_exception(error, pickles=pickles))
    assert record is not None
    return record


def test_record_names_the_class_as_tracebacks_do() -> None:
    assert record_of(KeyError(1)).name == "KeyError"
    assert record_of(OddError()).name == f"{__name__}.OddError"


def test_what_cannot_be_encoded_is_left_out() -> None:
    record = record_of(OddError(good=1, bad=object()))

    assert record.text == ""
    assert record.fields == {"good": b"\x01"}
    assert ValueReader().read(record.args) == ["odd"]


def test_arguments_that_cannot_be_encoded_leave_the_text() -> None:
    record = record_of(ValueError(object))

    assert record.args == b""
    assert record.text == "<class 'object'>"


@pytest.mark.parametrize("size", [EXCEPTION_MAX // 2, EXCEPTION_MAX, 1 << 24])
def test_large_arguments_are_left_out(size: int) -> None:
    encoded = encode_exception(ValueError("x" * size), pickles=True)

    assert len(encoded) < EXCEPTION_MAX
    record = decode_exception(encoded)
    assert record is not None
    assert record.args == b""


def test_deep_causes_and_wide_groups_are_limited() -> None:
    error: Exception = ValueError("first")
    for _ in range(100):
        cause, error = error, ValueError("next")
        error.__cause__ = cause
    group: Exception = ValueError("inner")
    for _ in range(8):
        group = ExceptionGroup("wide", [group] * 10)

    assert len(encode_exception(error)) < EXCEPTION_MAX
    assert 0 < len(encode_exception(group)) < EXCEPTION_MAX


def test_pickles_only_on_request() -> None:
    assert record_of(ValueError(1)).pickled == b""
    assert record_of(ValueError(1), pickles=True).pickled


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x90", b"\x81\xa4name\x01"])
def test_damaged_record_is_no_record(data: bytes) -> None:
    assert decode_exception(data) is None
