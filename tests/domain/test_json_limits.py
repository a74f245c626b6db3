"""Limits on the nesting and the size of JSON."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.json_limits import (
    NESTING_MAX,
    has_more_values,
    is_too_deep,
    may_be_too_deep,
)


@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")], ids=str)
def test_nesting_is_limited(pair: tuple[str, str]) -> None:
    begin, end = pair

    def nested(depth: int) -> str:
        return begin * depth + "1" + end * depth

    assert not is_too_deep(json.loads(nested(NESTING_MAX)))
    assert is_too_deep(json.loads(nested(NESTING_MAX + 1)))
    assert is_too_deep([1, {"a": json.loads(nested(NESTING_MAX - 1))}, "[[["])
    assert not may_be_too_deep(nested(NESTING_MAX))
    assert may_be_too_deep(nested(NESTING_MAX + 1))


def test_width_does_not_count_as_depth() -> None:
    assert not is_too_deep([[]] * 10 * NESTING_MAX)
    assert not is_too_deep(1)


MOST = 10

FULL = {
    "members": "[" + "1," * MOST + "1]",
    "lists in lists": "[" * MOST + "1" + "]" * MOST + "[]",
    "objects of one member": '{"a":' * (MOST + 1) + "1" + "}" * (MOST + 1),
    "strings behind a string": '["' + "," * MOST + '",' + '"a",' * MOST + "1]",
    "strings that nothing parts": '",' + "," * MOST + '"' + '""' * 3 * MOST,
}

NOT_FULL = {
    "as many as there may be": "[" + "1," * (MOST - 1) + "1]",
    "one long string": json.dumps(',[{\\"' * 10 * MOST),
    "named strings": json.dumps({f",,{n}": "{[," for n in range(MOST)}),
    "a string without an end": '"' + "," * 2 * MOST,
}


@pytest.mark.parametrize("text", FULL.values(), ids=FULL)
def test_too_many_values_are_rejected_before_decoding(text: str) -> None:
    assert has_more_values(text, MOST)


@pytest.mark.parametrize("text", NOT_FULL.values(), ids=NOT_FULL)
def test_commas_and_brackets_in_strings_do_not_count(text: str) -> None:
    assert not has_more_values(text, MOST)


_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_JSON = st.recursive(
    st.integers() | st.text('",[{\\\\\\x', max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('",\\', max_size=4), inner),
)


@given(_JSON)
def test_windows_cut_no_escape_and_no_string(value: object) -> None:
    text = json.dumps(value)
    values = sum(_STRING.sub("", text).count(mark) for mark in ",[{")

    for window in (2, 3, 5, 1 << 18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.domain.json_limits.WINDOW", window)
            assert has_more_values(text, values - 1)
            if text.count('"') <= 4 * values:
                assert not has_more_values(text, values)
