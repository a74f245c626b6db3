"""How many threads a model gets."""

import pytest

from shoal.engines.processors import processors, threads_for


@pytest.mark.parametrize(
    ("logical", "physical", "threads"),
    [(1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 2, 2), (4, 4, 3), (16, 8, 8), (64, 64, 63)],
)
def test_one_processor_is_left_to_others(
    logical: int, physical: int, threads: int
) -> None:
    assert threads_for(logical, physical) == threads


def test_this_machine_has_no_more_cores_than_processors() -> None:
    logical, physical = processors()

    assert 1 <= physical <= logical
