"""Values as JavaScript coerces them; expected results by ECMA-262 and Node.js."""

from typing import Any

import pytest

from shoal.gateway import javascript


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (0.0, 0),
        (2, 2),
        (1e-7, 1e-7),
        ("0.7", 0.7),
        ("  0.7abc", 0.7),
        (".5", 0.5),
        ("1e-1x", 0.1),
        ("-1.", -1),
        ("hot", 0),
        ("\u0661", 0),  # a digit, but not here
        ("", 0),
        (None, 0),
        (True, 0),
        ([0.3, 9], 0.3),
        ([[0.3]], 0.3),
        ([], 0),
        ({"a": 1}, 0),
        (float("inf"), 0),
    ],
)
def test_the_number_a_text_begins_with(value: Any, number: float) -> None:
    assert javascript.leading_float(value) == number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7.9, 7),
        (-7.9, -7),
        ("12abc", 12),
        ("many", 0),
        (1e21, 1),
        (1e20, 999),
        (1e16, 999),
        (1e-7, 1),
        (1e-5, 0),
        (10**400, 0),
        ("9" * 5000, 999),
        ("-" + "9" * 5000, -999),
        (1000, 999),
        (None, 0),
        (True, 0),
        (["5"], 5),
        ([[[]]], 0),
    ],
)
def test_the_integer_a_text_begins_with(value: Any, number: int) -> None:
    assert javascript.leading_int(value, 999) == number


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"NaN", b"[Infinity]", b"\xef\xbb\xbf{}", b"[" * 100_000, b"9" * 9999],
)
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        javascript.parse_json(data)


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert javascript.parse_json(b'"a\xffb"') == "a\ufffdb"


def test_texts_are_counted_in_utf_16() -> None:
    assert javascript.utf16_length("h😀y") == 4
