"""The options of calls."""

from typing import Any

import pytest

from shoal import AsyncPool, Pool
from shoal.client.options import Options, with_changes
from shoal.domain.errors import InvalidRequest
from shoal.domain.job import Gang


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
        ({"on_progress": print, "durable": False}, "on_progress"),
        ({"on_progress": print, "key": "k"}, "on_progress"),
        ({"gang": Gang("0" * 32, 0, 2, 2), "durable": False}, "gang"),
    ],
)
def test_error_names_the_invalid_option(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Options(**wrong)

    assert caught.value.field == field
    assert field in str(caught.value)


def test_only_changed_options_are_encoded() -> None:
    assert Options().encode() == {}
    assert Options(durable=False, timeout=2).encode() == {
        "kept": False,
        "timeout": 2.0,
    }


def test_gang_is_encoded_with_all_of_its_fields() -> None:
    gang = Gang("0a" * 16, rank=1, size=3, least=2)

    assert Options(gang=gang).encode() == {
        "gang": {"id": "0a" * 16, "rank": 1, "size": 3, "least": 2, "slots": 0}
    }


def test_unknown_option_error_lists_the_options() -> None:
    with pytest.raises(TypeError, match=r"no timeot=….*mean timeout.*priority"):
        with_changes(Options(), {"timeot": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("make", [Pool, AsyncPool])
@pytest.mark.parametrize(
    ("argument", "where"),
    [
        ("timeout", r"pool\.with_options\(timeout=…\)"),
        ("max_workers", "--slots"),
        ("colour", "its arguments are url"),
    ],
)
def test_unknown_argument_error_says_where_it_belongs(
    make: Any, argument: str, where: str
) -> None:
    with pytest.raises(TypeError, match=where):
        make("http://pool", "sk", **{argument: 3})
