"""What may be said about calls."""

from typing import Any

import pytest

from shoal.client.options import Options
from shoal.domain.errors import InvalidRequest


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"queue": float("inf")}, "queue"),
        ({"queue": 90_000}, "queue"),
        ({"priority": "urgent"}, "priority"),
        ({"key": "k", "durable": False}, "key"),
        ({"key": "k" * 300}, "key"),
    ],
)
def test_option_that_makes_no_sense_is_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Options(**wrong)

    assert caught.value.field == field
    assert field in str(caught.value)


def test_only_what_differs_is_written() -> None:
    assert Options().written() == {}
    assert Options(durable=False, timeout=2).written() == {
        "kept": False,
        "timeout": 2.0,
    }
