"""Jobs, and their membership of gangs."""

from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.job import GANG_MAX, Gang

RUN = "0123456789abcdef" * 2


def test_gang_may_have_one_member_or_many() -> None:
    assert Gang(RUN, 0, 1, 1).slots == 0
    assert Gang(RUN, GANG_MAX - 1, GANG_MAX, 1, 4).rank == GANG_MAX - 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"id": RUN.upper()}, "id: expected 32 hexadecimal digits in lower case"),
        ({"id": RUN[1:]}, "id: expected 32 hexadecimal digits in lower case"),
        ({"size": 0}, "size: expected 1 to 256, got 0"),
        ({"size": GANG_MAX + 1}, "size: expected 1 to 256, got 257"),
        ({"rank": 3}, "rank: expected 0 to 2, got 3"),
        ({"rank": -1}, "rank: expected 0 to 2, got -1"),
        ({"least": 4}, "least: expected 1 to 3, got 4"),
        ({"least": 0}, "least: expected 1 to 3, got 0"),
        ({"slots": -1}, "slots: expected 0 to 256, got -1"),
    ],
)
def test_error_names_what_is_wrong_with_a_gang(
    wrong: dict[str, Any], message: str
) -> None:
    right: dict[str, Any] = {"id": RUN, "rank": 0, "size": 3, "least": 2}

    with pytest.raises(InvalidRequest, match=f"gang: {message}") as caught:
        Gang(**(right | wrong))

    assert caught.value.field == "gang"
