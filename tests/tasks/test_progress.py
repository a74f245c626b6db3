"""Progress reports of tasks."""

from collections.abc import Iterator

import pytest

from shoal.tasks.limits import PROGRESS_TEXT_MAX
from shoal.tasks.running_call import progress, set_progress_handler


@pytest.fixture
def reports() -> Iterator[list[tuple[float | None, str]]]:
    received: list[tuple[float | None, str]] = []
    set_progress_handler(lambda share, remark: received.append((share, remark)))
    yield received
    set_progress_handler(None)


def test_outside_of_a_task_progress_does_nothing() -> None:
    progress(0.5, "half")


def test_first_and_last_report_are_sent(
    reports: list[tuple[float | None, str]],
) -> None:
    for number in range(1000):
        progress(number / 1000)
    progress(1, "done")

    assert reports[0] == (0.0, "")
    assert reports[-1] == (1.0, "done")
    assert len(reports) < 100


def test_long_remark_is_truncated(reports: list[tuple[float | None, str]]) -> None:
    progress(remark="x" * 1000)

    assert reports == [(None, "x" * PROGRESS_TEXT_MAX)]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_invalid_share_is_rejected(share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        progress(share)
