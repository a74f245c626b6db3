"""What a task says of how far it has come."""

from collections.abc import Iterator

import pytest

from shoal.tasks.limits import PROGRESS_TEXT_MAX
from shoal.tasks.progress import progress, set_progress_handler


@pytest.fixture
def said() -> Iterator[list[tuple[float | None, str]]]:
    words: list[tuple[float | None, str]] = []
    set_progress_handler(lambda share, remark: words.append((share, remark)))
    yield words
    set_progress_handler(None)


def test_outside_of_a_task_progress_does_nothing() -> None:
    progress(0.5, "half")


def test_first_and_last_report_are_sent(
    said: list[tuple[float | None, str]],
) -> None:
    for number in range(1000):
        progress(number / 1000)
    progress(1, "done")

    assert said[0] == (0.0, "")
    assert said[-1] == (1.0, "done")
    assert len(said) < 100


def test_long_remark_is_truncated(said: list[tuple[float | None, str]]) -> None:
    progress(remark="x" * 1000)

    assert said == [(None, "x" * PROGRESS_TEXT_MAX)]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_invalid_share_is_rejected(share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        progress(share)
