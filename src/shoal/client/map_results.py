"""Waits for calls, and the results of a ``map`` with a bounded number of open calls.

A wait lends the slot of a task that waits for calls of its own.  Closing an iterator
before its end cancels the remaining calls.
"""

import asyncio
import queue
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Generator,
    Iterable,
    Iterator,
)
from concurrent import futures
from concurrent.futures import Future
from contextlib import aclosing, closing
from itertools import islice
from operator import length_hint
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.tasks.running_call import LEND_AFTER, runs_tasks, slot_lent

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


AHEAD_MAX = 8192  # outstanding calls beyond the results already read
AHEAD_FIRST = 64  # the same at first, if the number of items is unknown

MapItems: TypeAlias = Iterable[Any] | AsyncIterable[Any]


class MapWindow:
    """The number of outstanding calls of a ``map``.

    Items of an unknown number may be endless, and dear: at first few are read, and two
    for each result, up to the limit.  A ``buffersize`` is the number throughout.

    Raises TypeError and ValueError as ``Executor.map`` does.
    """

    def __init__(self, iterables: Iterable[MapItems], buffersize: int | None) -> None:
        if not isinstance(buffersize, int | None):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        known = any(_has_length(each) for each in iterables)
        self.size = buffersize or (AHEAD_MAX if known else AHEAD_FIRST)
        self._max = buffersize or AHEAD_MAX

    def advance(self) -> int:
        """Return the number of calls to submit for a result."""
        if self.size == self._max:
            return 1
        self.size += 1
        return 2


def _has_length(items: MapItems) -> bool:
    try:
        return length_hint(items, -1) >= 0
    except OverflowError:  # a range can be too long for len()
        return True


def in_order(
    ahead: deque[Future[R]], submitted: Iterator[Future[R]], window: MapWindow
) -> Generator[Future[R], None, None]:
    """Yield futures in submission order; submit another for each."""
    try:
        while ahead:
            yield ahead[0]  # still in the deque, so an early close cancels it
            ahead.popleft()
            ahead.extend(islice(submitted, window.advance()))
    finally:
        for future in ahead:
            future.cancel()


def as_done(
    ahead: deque[Future[R]],
    submitted: Iterator[Future[R]],
    window: MapWindow,
    deadline: float | None,
) -> Generator[Future[R], None, None]:
    """Yield futures in completion order; submit another for each.

    Raises TimeoutError.
    """
    open_futures = set(ahead)
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    for future in ahead:
        future.add_done_callback(done.put)
    ahead.clear()
    try:
        while open_futures:
            try:
                future = next_of(done, remaining(deadline))
            except queue.Empty:
                raise TimeoutError from None
            open_futures.remove(future)
            yield future
            for another in islice(submitted, window.advance()):
                open_futures.add(another)
                another.add_done_callback(done.put)
    finally:
        for future in open_futures:
            future.cancel()


def results(
    window: Generator[Future[R], None, None], deadline: float | None
) -> Iterator[R]:
    """Yield results.  Raises the exception of a call, or TimeoutError."""
    with closing(window):
        for future in window:
            yield future.result(remaining(deadline))


def outcomes(
    window: Generator[Future[R], None, None], deadline: float | None
) -> Iterator[R | Exception]:
    """Yield results or exceptions of calls.  Raises TimeoutError."""
    with closing(window):
        for future in window:
            try:
                yield future.result(remaining(deadline))
            except Exception as error:
                if not future.done():  # the wait timed out
                    raise
                yield error


T = TypeVar("T")


class AsyncResults(Generic[T]):
    """The results of a ``map``: all by ``await``, or one by one by ``async for``."""

    def __init__(self, results: AsyncGenerator[T, None]) -> None:
        self._results = results

    def __aiter__(self) -> AsyncIterator[T]:
        return self._results

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        async with aclosing(self._results):
            return [result async for result in self._results]


async def async_in_order(
    submitted: Iterator[Awaitable[asyncio.Future[R]]], window: MapWindow
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures in submission order; submit another for each."""
    ahead: deque[asyncio.Future[R]] = deque()
    try:
        for each in islice(submitted, window.size):
            ahead.append(await each)
        while ahead:
            yield ahead[0]  # still in the deque, so an early close cancels it
            ahead.popleft()
            for each in islice(submitted, window.advance()):
                ahead.append(await each)
    finally:
        for future in ahead:
            future.cancel()


async def async_as_done(
    submitted: Iterator[Awaitable[asyncio.Future[R]]], window: MapWindow
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures in completion order; submit another for each."""
    open_futures: set[asyncio.Future[R]] = set()
    done: asyncio.Queue[asyncio.Future[R]] = asyncio.Queue()

    async def submit(number: int) -> None:
        for each in islice(submitted, number):
            future = await each
            open_futures.add(future)
            future.add_done_callback(done.put_nowait)

    try:
        await submit(window.size)
        while open_futures:
            future = await done.get()
            open_futures.remove(future)
            yield future
            await submit(window.advance())
    finally:
        for future in open_futures:
            future.cancel()


async def async_from_source(
    submitted: AsyncGenerator[asyncio.Future[R], None],
    window: MapWindow,
    *,
    ordered: bool,
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures that are done, while further items are awaited."""
    open_futures: deque[asyncio.Future[R]] = deque()
    done: deque[asyncio.Future[R]] = deque()
    changed = asyncio.Event()
    source_ended = False
    following: asyncio.Task[asyncio.Future[R]] | None = None

    def on_done(future: asyncio.Future[R]) -> None:
        done.append(future)
        changed.set()

    try:
        while open_futures or not source_ended:
            changed.clear()
            if following is not None and following.done():
                try:
                    future = following.result()
                except StopAsyncIteration:
                    source_ended = True
                else:
                    open_futures.append(future)
                    future.add_done_callback(on_done)
                following = None
            if (
                following is None
                and not source_ended
                and len(open_futures) < window.size
            ):
                following = asyncio.create_task(_following(submitted))
                following.add_done_callback(lambda _: changed.set())
            if ordered and open_futures and open_futures[0].done():
                yield open_futures.popleft()
                window.advance()
            elif done and not ordered:
                open_futures.remove(ended := done.popleft())
                yield ended
                window.advance()
            elif open_futures or not source_ended:
                await changed.wait()
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled() and following.exception() is None:
                open_futures.append(following.result())
        for each in open_futures:
            each.cancel()
        await submitted.aclose()


async def _following(submitted: AsyncGenerator[R, None]) -> R:
    return await anext(submitted)


END = object()


async def zip_async(iterables: Iterable[MapItems]) -> AsyncGenerator[list[Any], None]:
    """Yield the items of iterables, of which some are asynchronous, side by side."""
    iterators = [
        aiter(each) if isinstance(each, AsyncIterable) else iter(each)
        for each in iterables
    ]
    while True:
        items = [
            await anext(each, END)
            if isinstance(each, AsyncIterator)
            else next(each, END)
            for each in iterators
        ]
        if any(item is END for item in items):
            return
        yield items


async def async_outcomes(
    window: AsyncGenerator[asyncio.Future[R], None], *, return_exceptions: bool
) -> AsyncGenerator[R | Exception, None]:
    """Yield results, and with ``return_exceptions`` exceptions; else raise them."""
    async with aclosing(window):
        async for future in window:
            try:
                yield await future
            except Exception as error:
                if not return_exceptions:
                    raise
                yield error
