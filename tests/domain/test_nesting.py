"""How deep JSON may be."""

import json

import pytest

from shoal.domain.nesting import NESTING_MAX, is_deep, may_be_deep


@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")], ids=str)
def test_nesting_has_a_limit(pair: tuple[str, str]) -> None:
    begin, end = pair

    def nested(depth: int) -> str:
        return begin * depth + "1" + end * depth

    assert not is_deep(json.loads(nested(NESTING_MAX)))
    assert is_deep(json.loads(nested(NESTING_MAX + 1)))
    assert is_deep([1, {"a": json.loads(nested(NESTING_MAX - 1))}, "[[["])
    assert not may_be_deep(nested(NESTING_MAX))
    assert may_be_deep(nested(NESTING_MAX + 1))


def test_width_is_no_depth() -> None:
    assert not is_deep([[]] * 10 * NESTING_MAX)
    assert not is_deep(1)
