"""The progress of a batch: each line is started once, and the batch ends."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.batches.progress import (
    AwaitChange,
    BatchProgress,
    CancelLines,
    FinalizeBatch,
    StartLines,
)
from shoal.store.batches import BatchStatus


def started(progress: BatchProgress, now: float = 0.0, room: int = 9) -> list[int]:
    """Return the lines that the next action starts."""
    action = progress.next_action(now, room)
    assert isinstance(action, StartLines), action
    return [*action.lines]


def test_lines_are_started_in_order_while_there_is_room() -> None:
    progress = BatchProgress(5)

    assert started(progress, room=2) == [1, 2]
    assert progress.next_action(0.0, 0) == AwaitChange(None, for_room=True)
    progress.record(2)
    assert started(progress, room=1) == [3]


def test_batch_is_complete_when_all_lines_are_recorded() -> None:
    progress = BatchProgress(2)
    started(progress)

    progress.record(1)
    assert progress.next_action(0.0, 9) == AwaitChange(None, for_room=False)
    progress.record(2)
    assert progress.next_action(0.0, 9) == FinalizeBatch(BatchStatus.COMPLETED)


def test_restart_looks_after_lines_with_a_job_first_and_needs_no_room() -> None:
    progress = BatchProgress(6, recorded=[1, 4], begun=[1, 2, 5])

    assert started(progress, room=0) == [2, 5]
    assert started(progress) == [3, 6]


def test_postponed_line_is_started_again_when_it_is_due() -> None:
    progress = BatchProgress(1)
    started(progress)
    progress.postpone(1, 7.0)

    assert progress.next_action(6.9, 9) == AwaitChange(7.0, for_room=False)
    assert progress.next_action(7.0, 0) == AwaitChange(None, for_room=True)
    assert started(progress, 7.0) == [1]


def test_paused_batch_begins_no_line_until_the_pause_is_over() -> None:
    progress = BatchProgress(3, begun=[2])
    progress.pause(7.0)
    progress.pause(5.0)

    assert started(progress) == [2]
    assert progress.next_action(6.9, 9) == AwaitChange(7.0, for_room=False)
    assert started(progress, 7.0) == [1, 3]


@pytest.mark.parametrize("status", [BatchStatus.CANCELLED, BatchStatus.EXPIRED])
def test_batch_that_ends_early_begins_no_line_and_waits_for_those_that_run(
    status: BatchStatus,
) -> None:
    progress = BatchProgress(9, begun=[3])
    progress.ending = status

    assert started(progress) == [3]
    assert progress.next_action(0.0, 9) == CancelLines()
    progress.give_up(3)
    assert progress.next_action(0.0, 9) == FinalizeBatch(status)
    assert [*progress.unrecorded] == [*range(1, 10)]


def test_batch_that_expires_with_its_last_line_is_complete() -> None:
    progress = BatchProgress(1, recorded=[1])
    progress.ending = BatchStatus.EXPIRED

    assert progress.next_action(0.0, 9) == FinalizeBatch(BatchStatus.COMPLETED)


@given(
    lines=st.integers(1, 30),
    recorded=st.sets(st.integers(1, 30)),
    begun=st.sets(st.integers(1, 30)),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans())),
)
def test_each_line_is_recorded_once_whatever_happens(
    lines: int,
    recorded: set[int],
    begun: set[int],
    steps: list[tuple[int, int, bool]],
) -> None:
    before = {line for line in recorded if line <= lines}
    progress = BatchProgress(lines, before, {line for line in begun if line <= lines})
    running: list[int] = []
    results = Counter(before)
    now = 0.0

    for room, which, fails in [*steps, *[(3, 0, False)] * 100]:
        now += 1.0
        action = progress.next_action(now, room)
        if isinstance(action, StartLines):
            running += action.lines
            assert not results.keys() & {*action.lines}
        if running:
            line = running.pop(which % len(running))
            if fails:
                progress.postpone(line, now + which)
            else:
                progress.record(line)
                results[line] += 1
        assert progress.running == len(running)
        assert len(running) == len({*running})

    while running:
        line = running.pop()
        progress.record(line)
        results[line] += 1
    left = lines - len(results)
    while left:
        for line in started(progress, now + 1000.0):
            progress.record(line)
            results[line] += 1
            left -= 1
    assert results == Counter(range(1, lines + 1))
    assert progress.next_action(now, 0) == FinalizeBatch(BatchStatus.COMPLETED)
