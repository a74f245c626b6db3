"""How deep JSON may be, and how full."""

import json

import pytest

from shoal.domain.json_limits import (
    NESTING_MAX,
    has_more_values,
    is_too_deep,
    may_be_too_deep,
)


@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")], ids=str)
def test_nesting_has_a_limit(pair: tuple[str, str]) -> None:
    begin, end = pair

    def nested(depth: int) -> str:
        return begin * depth + "1" + end * depth

    assert not is_too_deep(json.loads(nested(NESTING_MAX)))
    assert is_too_deep(json.loads(nested(NESTING_MAX + 1)))
    assert is_too_deep([1, {"a": json.loads(nested(NESTING_MAX - 1))}, "[[["])
    assert not may_be_too_deep(nested(NESTING_MAX))
    assert may_be_too_deep(nested(NESTING_MAX + 1))


def test_width_is_no_depth() -> None:
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
def test_more_values_than_wanted_are_told_before_they_are_made(text: str) -> None:
    assert has_more_values(text, MOST)


@pytest.mark.parametrize("text", NOT_FULL.values(), ids=NOT_FULL)
def test_texts_full_of_commas_and_brackets_are_single_values(text: str) -> None:
    assert not has_more_values(text, MOST)
