"""JSON as JavaScript reads and writes it."""

import hashlib
import json
import math
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.dispatch.recorded import Case, each_of_kind
from shoal.domain.errors import PeerError
from shoal.domain.json_limits import NESTING_MAX
from shoal.protocols.dispatch.ecmascript_json import (
    VALUES_MAX,
    NotJson,
    canonical,
    parse,
    stringify,
    to_json,
    to_string,
    well_formed,
    with_lone_surrogates_replaced,
)

texts = st.text(st.characters(exclude_categories=[]), max_size=12)
keys = (
    texts | st.integers(0, 2**33).map(str) | st.sampled_from(["01", "-1", "1.0", "٣"])
)
numbers = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(1e-9, 1e-3)
    | st.integers(2**53, 10**23)
)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@each_of_kind("canonical_json")
def test_texts_are_serialized_as_javascript_does(case: Case) -> None:
    found = canonical(case["in_json_text"])

    assert found.hex() == case["canonical_utf8_hex"]
    assert hashlib.sha256(found).hexdigest() == case["sha256"]
    assert canonical(case["in_json_text"].encode()) == found


@settings(max_examples=examples(0.4))
@given(value=values, indent=st.none() | st.just(1), ascii_=st.booleans())
def test_serialization_follows_the_standard(
    value: Any, indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    if not ascii_:
        text = re.sub("[\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", text)

    found = canonical(text)

    assert found.decode() == model(json.loads(text))
    assert canonical(found) == found


@given(number=numbers)
def test_numbers_keep_their_value(number: float) -> None:
    assert float(canonical(json.dumps(number))) == float(number)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "NaN", "[Infinity]", "-Infinity", "[1,]", "01", "1.", ".5", "'a'",
     '"\n"', '"\\x41"', '{"a" 1}', "1 2", "\ufeff{}", "\ud800", '"\ud800"'],
)  # fmt: skip
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(NotJson, match="not JSON"):
        canonical(text)
    with pytest.raises(NotJson, match="not JSON"):
        parse(text)


@pytest.mark.parametrize("data", [b"\xff", b'"\xed\xa0\x80"', b"\xef\xbb\xbf{}"])
def test_bytes_that_are_not_utf8_are_refused(data: bytes) -> None:
    with pytest.raises(NotJson):
        canonical(data)


@given(data=st.binary() | st.text().map(str.encode))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        found = canonical(data)
    except PeerError:
        return
    assert canonical(found) == found


def test_nesting_has_a_limit() -> None:
    deepest = "[" * NESTING_MAX + "]" * NESTING_MAX
    assert canonical(deepest) == deepest.encode()

    for depth in (NESTING_MAX + 2, VALUES_MAX // 2):
        with pytest.raises(PeerError, match="nested more deeply than 100 levels"):
            canonical("[" * depth + "]" * depth)
    with pytest.raises(PeerError):
        canonical("[" * 1_000_000)


def test_values_have_a_limit_but_texts_do_not() -> None:
    with pytest.raises(PeerError, match=f"more than {VALUES_MAX} values"):
        canonical("[" + "1.5," * VALUES_MAX * 2 + "1]")
    long = json.dumps({"text": 'a, "b", \\c' * VALUES_MAX})
    assert canonical(long) == long.replace('": "', '":"').encode()
    with pytest.raises(PeerError):
        canonical('"' + '\\"' * VALUES_MAX + "," * 2 * VALUES_MAX)


@settings(max_examples=examples(0.4))
@given(value=values)
def test_local_values_are_serialized_in_the_same_form(value: Any) -> None:
    made = json.loads(json.dumps(value))  # whole characters, where there were halves

    assert stringify(value) == canonical(json.dumps(value))
    assert stringify(made) == canonical(json.dumps(made))


def test_nan_and_infinity_become_null() -> None:
    assert stringify([math.nan, math.inf, 1.0]) == b"[null,null,1]"


def test_a_local_value_nested_too_deeply_is_refused() -> None:
    deep: Any = []
    for _ in range(200_000):
        deep = [deep]

    with pytest.raises(PeerError, match="nested"):
        stringify(deep)


@given(text=texts)
def test_lone_surrogates_in_texts_are_replaced(text: str) -> None:
    mend = well_formed(text)

    assert mend == re.sub("[\ud800-\udfff]", "\ufffd", _joined(text))
    assert with_lone_surrogates_replaced([text, {text: text}]) == [mend, {mend: mend}]
    assert json.loads(to_json({"a": text})) == {"a": mend}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (5, "5"), (1.0, "1"), (1e21, "1e+21"),
        ("a", "a"), ({}, "[object Object]"), ([], ""), (["register"], "register"),
        ([1, None, [2, "x"], {}], "1,,2,x,[object Object]"),
    ],
)  # fmt: skip
def test_values_are_converted_to_text_as_in_javascript(
    value: object, text: str
) -> None:
    assert to_string(value) == text


# The standard, followed step by step: slow, and written without looking at the other.


def model(value: Any) -> str:
    """``SerializeJSONProperty`` of what ``JSON.parse`` made (ECMAScript, 25.5)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return number_text(float(value))
        except OverflowError:  # of an integer: JavaScript has Infinity
            return "null"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return "[" + ",".join(model(each) for each in value) + "]"
    ordered = [key for key in value if is_array_index(key)]
    ordered.sort(key=int)
    ordered += [key for key in value if not is_array_index(key)]
    return "{" + ",".join(quoted(k) + ":" + model(value[k]) for k in ordered) + "}"


def is_array_index(key: str) -> bool:
    if not re.fullmatch("[0-9]+", key):
        return False
    return str(int(key)) == key and int(key) <= 2**32 - 2


def quoted(text: str) -> str:
    """``QuoteJSONString``."""
    short = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
    made = '"'
    for character in text:
        code = ord(character)
        if code in short:
            made += "\\" + short[code]
        elif code < 0x20 or 0xD800 <= code <= 0xDFFF:
            made += f"\\u{code:04x}"
        else:
            made += character
    return made + '"'


def number_text(x: float) -> str:
    """``Number::toString`` with radix 10 (ECMAScript, 6.1.6.1.20)."""
    if math.isinf(x):
        return "null"  # as JSON
    if x == 0:
        return "0"
    if x < 0:
        return "-" + number_text(-x)
    _, digits, exponent = Decimal(repr(x)).normalize().as_tuple()
    assert isinstance(exponent, int)
    s = "".join(map(str, digits))
    k, n = len(s), len(s) + exponent
    if k <= n <= 21:
        return s + "0" * (n - k)
    if 0 < n <= 21:
        return s[:n] + "." + s[n:]
    if -6 < n <= 0:
        return "0." + "0" * -n + s
    sign = "+" if n - 1 > 0 else "-"
    power = f"e{sign}{abs(n - 1)}"
    return s + power if k == 1 else s[0] + "." + s[1:] + power


def _joined(text: str) -> str:
    """Make whole characters of halves that happen to stand side by side."""
    halves = text.encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "surrogatepass") if _pairs(text) else text


def _pairs(text: str) -> bool:
    return bool(re.search("[\ud800-\udbff][\udc00-\udfff]", text))
