"""The course of a run in numbers, from what its ranks report."""

import pytest

from shoal.training.run_events import (
    POINTS_MAX,
    POINTS_OF_ENDED,
    RANKS_KEPT,
    RunProgress,
    StepPoint,
)


def test_points_are_those_of_the_first_rank() -> None:
    progress = RunProgress()

    progress.report(1, {"step": 1, "loss": 9.0}, 10.0)
    progress.report(0, {"step": 1, "loss": 4.0}, 11.0)
    progress.report(1, {"step": 3, "loss": 8.0}, 14.0)
    progress.report(0, {"step": 3, "loss": 2.0}, 15.0)
    progress.report(0, {"samples": 3}, 16.0)

    assert progress.points == [
        StepPoint(1, 4.0, None, 11.0),
        StepPoint(3, 2.0, 2.0, 15.0),
    ]
    assert progress.last == progress.points[-1]
    assert (progress.ranks[1].step, progress.ranks[1].step_seconds) == (3, 2.0)


def test_run_that_goes_on_from_a_checkpoint_replaces_its_steps() -> None:
    progress = RunProgress()
    for step in (1, 2, 3, 2):
        progress.report(0, {"step": step, "loss": float(step)}, float(step))

    assert [each.step for each in progress.points] == [1, 2]


@pytest.mark.parametrize(
    "step", [-1, -1.7e308, 1.7e308, 2**53 + 1, float("inf"), float("nan")]
)
def test_step_that_cannot_be_one_is_left_out(step: float) -> None:
    progress = RunProgress()
    progress.report(0, {"step": 1, "loss": 4.0}, 1.0)

    progress.report(0, {"step": step, "loss": 3.0}, 2.0)
    progress.report(0, {"step": 2, "loss": 2.0}, 3.0)

    assert progress.points == [
        StepPoint(1, 4.0, None, 1.0),
        StepPoint(2, 2.0, 2.0, 3.0),
    ]


def test_points_are_thinned_and_keep_both_ends() -> None:
    progress = RunProgress()
    for step in range(10 * POINTS_MAX):
        progress.report(0, {"step": step}, float(step))

        assert len(progress.points) <= POINTS_MAX

    steps = [each.step for each in progress.points]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 10 * POINTS_MAX - 1)
    assert len(steps) >= POINTS_MAX // 2
    progress.shrink()
    assert len(progress.points) <= POINTS_OF_ENDED + 1
    assert progress.points[-1].step == steps[-1]


def test_ranks_are_bounded() -> None:
    progress = RunProgress()
    for rank in range(2 * RANKS_KEPT):
        progress.start(rank)
        progress.report(rank, {"step": 1}, 1.0)
        progress.end(rank)

    assert len(progress.ranks) == RANKS_KEPT
    assert not progress.ranks[0].running
