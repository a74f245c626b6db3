import math
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger.canonical import (
    encode,
    from_base64,
    from_time,
    to_base64,
    to_time,
    without_surrogates,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@given(VALUES)
def test_output_follows_rfc_8785(value: Any) -> None:
    assert encode(value) == rfc8785.dumps(value)


@given(st.dictionaries(st.text(st.characters(max_codepoint=0x7F)), SCALARS))
def test_fast_path_gives_the_same_output(value: Any) -> None:
    assert encode(value) == rfc8785.dumps(value)


def test_every_character_is_escaped_alike() -> None:
    # Beyond the controls, none is special: one of seven stands for the others.
    codes = [*range(0x3000), *range(0x3000, 0x110000, 7)]
    characters = [chr(n) for n in codes if not 0xD800 <= n < 0xE000]

    text = "".join(characters)

    assert encode(text) == rfc8785.dumps(text)


def test_names_are_sorted_by_their_utf_16() -> None:
    # The examples of RFC 8785, section 3.2.3.
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]

    written = encode(dict.fromkeys(names))

    order = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(msgspec.json.decode(written)) == order


@pytest.mark.parametrize(
    "value",
    [
        2**53,
        -(2**53),
        math.nan,
        math.inf,
        "\ud800",
        {"\ud800": 1},
        {"a": [2**53]},
        {1: 2},
        {"a": object()},
        b"bytes",
    ],
)
def test_unsupported_value_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        encode(value)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("plain", "plain"),
        ("\u00fc \U0001f600", "\u00fc \U0001f600"),
        ("\ud800", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),  # both surrogates, separated
    ],
)
def test_surrogates_are_replaced(text: str, whole: str) -> None:
    assert without_surrogates(text) == whole


@given(st.binary())
def test_base64_round_trips(data: bytes) -> None:
    assert from_base64(to_base64(data)) == data


@pytest.mark.parametrize(
    "text",
    [
        "AB==",
        "AAB=",
        "AA",
        "AA=",
        "A===",
        "AA==\n",
        " AA==",
        "AA-_",
        "AA==AA==",
        "=",
        "\u00fc",
        "AA==AA",
        "QQ===",
    ],
)
def test_base64_has_one_form(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_base64(text)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_770_638_405.123, "2026-02-09T12:00:05.123Z"),
        (1_770_638_405.9996, "2026-02-09T12:00:06.000Z"),
        (-0.001, "1969-12-31T23:59:59.999Z"),
    ],
)
def test_time_is_written_with_milliseconds(at: float, text: str) -> None:
    assert to_time(at) == text


@given(st.floats(-6e10, 2.5e11))
def test_time_round_trips(at: float) -> None:
    assert to_time(from_time(to_time(at))) == to_time(at)


@pytest.mark.parametrize("at", [1e12, -1e12, 1e300, math.inf])
def test_invalid_time_is_rejected(at: float) -> None:
    with pytest.raises(ValueError, match="no time"):
        to_time(at)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-02-09",
        "2026-02-09T12:00:05Z",
        "2026-02-09T12:00:05.123+00:00",
        "2026-02-30T12:00:05.000Z",
        "2026-02-09T12:00:05.1234Z",
        "0000-01-01T00:00",
        "2026-02-09T12:00:05.123Z\n",
        "0000-01-01T00:00:00.000Z",
    ],
)
def test_time_has_one_form(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_time(text)
