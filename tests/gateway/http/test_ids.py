"""Ids that nobody can guess from others."""

import random
import re
from collections.abc import Callable

import pytest

from shoal.gateway.http import ids


@pytest.mark.parametrize(
    ("draw", "digits"),
    [(ids.new_id, 24), (ids.new_trace_id, 32), (ids.new_span_id, 16)],
)
def test_ids_do_not_follow_from_a_seed(draw: Callable[[], str], digits: int) -> None:
    random.seed(1)
    first = [draw() for _ in range(100)]
    random.seed(1)
    second = [draw() for _ in range(100)]

    assert len({*first, *second}) == 200
    assert all(re.fullmatch(f"[0-9a-f]{{{digits}}}", each) for each in first)
