"""Waits for calls, which lend the slot of a task that waits for calls of its own."""

import queue
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from shoal.tasks.slot_lending import LEND_AFTER, runs_tasks, slot_lent

R = TypeVar("R")


def wait_for(future: Future[Any], timeout: float | None) -> float | None:
    """Wait for a future in a task; return what is left of the time.

    Outside tasks, this does nothing.
    """
    if not runs_tasks() or future.done():
        return timeout
    deadline = None if timeout is None else monotonic() + timeout
    futures.wait([future], _at_most(LEND_AFTER, deadline))
    if not future.done():
        with slot_lent():
            futures.wait([future], remaining(deadline))
    return remaining(deadline)


def next_of(done: "queue.SimpleQueue[R]", timeout: float | None) -> R:
    """Return the next item of a queue.  Raises queue.Empty after the timeout."""
    if not runs_tasks():
        return done.get(timeout=timeout)
    deadline = None if timeout is None else monotonic() + timeout
    try:
        return done.get(timeout=_at_most(LEND_AFTER, deadline))
    except queue.Empty:
        with slot_lent():
            return done.get(timeout=remaining(deadline))


def as_completed(
    awaited: Iterable[Future[R]], timeout: float | None
) -> Iterator[Future[R]]:
    """Yield futures as they complete.  Raises TimeoutError."""
    if not runs_tasks():
        return futures.as_completed(awaited, timeout)
    return _in_task(set(awaited), timeout)


def _in_task(awaited: set[Future[R]], timeout: float | None) -> Iterator[Future[R]]:
    deadline = None if timeout is None else monotonic() + timeout
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    for future in awaited:
        future.add_done_callback(done.put)
    for _ in awaited:
        try:
            yield next_of(done, remaining(deadline))
        except queue.Empty:
            raise TimeoutError from None


def remaining(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, at least 0; None if there is none."""
    return None if deadline is None else max(0.0, deadline - monotonic())


def _at_most(seconds: float, deadline: float | None) -> float:
    left = remaining(deadline)
    return seconds if left is None else min(seconds, left)
