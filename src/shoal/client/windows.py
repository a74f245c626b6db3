"""The results of a ``map``: as many calls ahead of those that were taken as may be out.

Leaving a window before its end cancels what is left.
"""

import queue
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import closing
from itertools import islice
from time import monotonic
from typing import TypeVar

R = TypeVar("R")


def in_order(
    ahead: deque[Future[R]], submitted: Iterator[Future[R]]
) -> Generator[Future[R], None, None]:
    """Yield futures as they were submitted, and submit another for each."""
    try:
        while ahead:
            yield ahead[0]  # which is cancelled as well if that is the last
            ahead.popleft()
            ahead.extend(islice(submitted, 1))
    finally:
        for future in ahead:
            future.cancel()


def as_they_come(
    ahead: deque[Future[R]], submitted: Iterator[Future[R]], deadline: float | None
) -> Generator[Future[R], None, None]:
    """Yield futures when they are done, and submit another for each.

    Raises TimeoutError.
    """
    out = set(ahead)
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    for future in ahead:
        future.add_done_callback(done.put)
    ahead.clear()
    try:
        while out:
            try:
                future = done.get(timeout=_left(deadline))
            except queue.Empty:
                raise TimeoutError from None
            out.remove(future)
            yield future
            for another in islice(submitted, 1):
                out.add(another)
                another.add_done_callback(done.put)
    finally:
        for future in out:
            future.cancel()


def results(
    window: Generator[Future[R], None, None], deadline: float | None
) -> Iterator[R]:
    """Yield results.  Raises what a call raised, and TimeoutError."""
    with closing(window):
        for future in window:
            yield future.result(_left(deadline))


def outcomes(
    window: Generator[Future[R], None, None], deadline: float | None
) -> Iterator[R | Exception]:
    """Yield results, or what calls raised.  Raises TimeoutError."""
    with closing(window):
        for future in window:
            try:
                yield future.result(_left(deadline))
            except Exception as error:
                if not future.done():  # it was waited for too long
                    raise
                yield error


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())
