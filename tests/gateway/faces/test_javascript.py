"""Values as JavaScript coerces them; expected results by ECMA-262 and Node.js."""

import math
from typing import Any

import pytest

from shoal.gateway.faces import javascript

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "number", "beginning"),
    [
        (0.5, 0.5, 0.5),
        (2, 2, 2),
        (1e-7, 1e-7, 1e-7),
        ("0.7", 0.7, 0.7),
        ("  0.7abc", NAN, 0.7),
        ("\ufeff\u2003.5\u2028", 0.5, 0.5),
        ("\x85.5", NAN, NAN),  # white space in Python only
        ("1e-1x", NAN, 0.1),
        ("-1.", -1, -1),
        ("0x10", 16, 0),
        ("0X1F ", 31, 0),
        ("-0x10", NAN, 0),
        ("0b11", 3, 0),
        ("0o17", 15, 0),
        ("0x" + "f" * 300, math.inf, 0),
        ("1_0", NAN, 1),
        ("Infinity", math.inf, math.inf),
        ("-Infinityx", NAN, -math.inf),
        ("inf", NAN, NAN),
        ("nan", NAN, NAN),
        ("hot", NAN, NAN),
        ("\u0661", NAN, NAN),  # a digit, but not here
        ("", 0, NAN),
        (" \n", 0, NAN),
        (None, 0, NAN),
        (True, 1, NAN),
        (False, 0, NAN),
        ([0.3], 0.3, 0.3),
        ([0.3, 9], NAN, 0.3),
        ([[0.3]], 0.3, 0.3),
        ([[1, 2]], NAN, 1),
        ([], 0, NAN),
        ([None], 0, NAN),
        ([None, 5], NAN, NAN),
        ([True], NAN, NAN),
        ({"a": 1}, NAN, NAN),
        (float("inf"), math.inf, math.inf),
        (-(10**400), -math.inf, -math.inf),
    ],
)
def test_numbers_in_texts(value: Any, number: float, beginning: float) -> None:
    assert javascript.to_number(value) == pytest.approx(number, rel=0, nan_ok=True)
    assert javascript.parse_float(value) == pytest.approx(beginning, rel=0, nan_ok=True)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7.9, 7),
        (-7.9, -7),
        ("12abc", 12),
        ("0x10", 16),
        ("0X1fz", 31),
        ("-0x10", -16),
        ("0x", 0),
        ("0b11", 0),
        ("010", 10),
        ("\u3000\t12", 12),
        ("\x1c12", 0),
        ("many", 0),
        (1e21, 1),
        (1e20, 999),
        (1e16, 999),
        (1e-7, 1),
        (1e-5, 0),
        (10**400, 0),
        ("9" * 5000, 999),
        ("0x" + "f" * 5000, 999),
        ("-" + "9" * 5000, -999),
        (1000, 999),
        (None, 0),
        (True, 0),
        (["5"], 5),
        (["5", 6], 5),
        ([[[]]], 0),
    ],
)
def test_parse_int_reads_the_leading_integer(value: Any, number: int) -> None:
    assert javascript.parse_int(value, 999) == number


@pytest.mark.parametrize(
    ("value", "falsy"),
    [
        (None, True), (False, True), (0, True), (-0.0, True), ("", True),
        ([], False), ({}, False), ("0", False), (1, False),
    ],
)  # fmt: skip
def test_empty_lists_and_objects_are_not_falsy(value: Any, falsy: bool) -> None:
    assert javascript.is_falsy(value) == falsy


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"NaN", b"[Infinity]", b"\xef\xbb\xbf{}", b"[" * 100_000, b"9" * 9999],
)
def test_invalid_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        javascript.parse_json(data)


def test_invalid_utf_8_is_replaced() -> None:
    assert javascript.parse_json(b'"a\xffb"') == "a\ufffdb"


def test_text_length_is_in_utf_16_units() -> None:
    assert javascript.utf16_length("h😀y") == 4
