"""JSON within text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.json_limits import NESTING_MAX
from shoal.engines import structured_prompts
from shoal.engines.structured_prompts import (
    compact,
    escape_surrogates,
    find_json,
    to_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
data = st.lists(values) | st.dictionaries(st.text(), values)


def found(text: str, openings: str = "{[") -> list[str]:
    return [each.text for each in find_json(text, openings)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing here", []),
        ('a {"x":1} b {"y":{"z":[1,2]}} c', ['{"x":1}', '{"y":{"z":[1,2]}}']),
        ("{bad} {'a': 1} {\"ok\": true}", ['{"ok": true}']),
        ('{"a":{"b":{"c":1}}}', ['{"a":{"b":{"c":1}}}']),
        ('{"open": {"inner": 1}', ['{"inner": 1}']),
        ('```json\n[{"a": 1}]\n```', ['[{"a": 1}]']),
        ('{"n": 1.10, "big": 12345678901234567890123}',) * 2,
        ('{"brackets": "}]{["}',) * 2,
        ("{} []", ["{}", "[]"]),
        ('{"a": NaN} {"a": Infinity} {"a": 1}', ['{"a": 1}']),
        ('{"a": "line\nbreak"}', []),
    ],
)
def test_found_json_is_verbatim(text: str, expected: str | list[str]) -> None:
    assert found(text) == ([expected] if isinstance(expected, str) else expected)


@given(st.lists(data, max_size=3))
def test_values_are_found_in_order(originals: list[object]) -> None:
    text = "; then: ".join(["so", *map(json.dumps, originals), "and so on"])

    assert [json.loads(each) for each in found(text)] == originals


@given(st.text(alphabet='{}[]",:1a \\'))
def test_everything_found_is_valid_json(text: str) -> None:
    for each in find_json(text):
        assert each.value == json.loads(each.text)


def test_ignored_lists_are_still_searched() -> None:
    assert found('[{"a":1},{"b":2}]', "{") == ['{"a":1}', '{"b":2}']


def test_number_of_any_length_is_supported() -> None:
    text = '{"n": ' + "9" * 5000 + "}"

    assert found(text) == [text]


def test_too_deep_value_is_skipped_but_searched() -> None:
    depth = NESTING_MAX + 50
    deep = "[" * depth + "]" * depth

    (inner,) = found(deep)

    assert inner.count("[") == NESTING_MAX + 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[1," * 20_000,
        '{"a":' * 20_000,
        ("[1,[" + "1," * 500) * 900,
        "[1," * 900 + "1," * 50_000,
        "[1," * 900 + "1," * 50_000 + "NaN" + "]" * 900,
    ],
    ids=["opened", "lists", "objects", "deep and wide", "wide", "constant"],
)
def test_endless_brackets_are_rejected(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(structured_prompts, "WASTED_MAX", 1 << 18)

    with pytest.raises(ValueError, match="begins like JSON"):
        list(find_json(text))


@given(values)
def test_written_json_can_be_encoded_and_decoded(value: object) -> None:
    assert json.loads(to_json(value).encode()) == value


@given(values)
def test_compact_removes_only_spaces(value: object) -> None:
    spaced = json.dumps(value, indent=3, separators=(" ,", " :\t"))

    assert compact(spaced) == json.dumps(value, separators=(",", ":"))


def test_lone_surrogate_is_escaped() -> None:
    assert escape_surrogates('"a\ud800b"') == '"a\\ud800b"'
    assert to_json({"é": "\udfff"}) == '{"é":"\\udfff"}'
