"""The results of a ``map``, with a bounded number of outstanding calls.

Closing an iterator before its end cancels the remaining calls.
"""

import asyncio
import queue
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Generator,
    Iterator,
)
from concurrent.futures import Future
from contextlib import aclosing, closing
from itertools import islice
from time import monotonic
from typing import Any, Generic, TypeVar

R = TypeVar("R")


def in_order(
    ahead: deque[Future[R]], submitted: Iterator[Future[R]]
) -> Generator[Future[R], None, None]:
    """Yield futures in submission order; submit another for each."""
    try:
        while ahead:
            yield ahead[0]  # still in the deque, so an early close cancels it
            ahead.popleft()
            ahead.extend(islice(submitted, 1))
    finally:
        for future in ahead:
            future.cancel()


def as_done(
    ahead: deque[Future[R]], submitted: Iterator[Future[R]], deadline: float | None
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
                future = done.get(timeout=_remaining(deadline))
            except queue.Empty:
                raise TimeoutError from None
            open_futures.remove(future)
            yield future
            for another in islice(submitted, 1):
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
            yield future.result(_remaining(deadline))


def outcomes(
    window: Generator[Future[R], None, None], deadline: float | None
) -> Iterator[R | Exception]:
    """Yield results or exceptions of calls.  Raises TimeoutError."""
    with closing(window):
        for future in window:
            try:
                yield future.result(_remaining(deadline))
            except Exception as error:
                if not future.done():  # the wait timed out
                    raise
                yield error


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


T = TypeVar("T")

AHEAD_MAX = 8192  # outstanding calls beyond the results already read


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
    submitted: Iterator[Awaitable[asyncio.Future[R]]],
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures in submission order; submit another for each."""
    ahead: deque[asyncio.Future[R]] = deque()
    try:
        for each in islice(submitted, AHEAD_MAX):
            ahead.append(await each)
        while ahead:
            yield ahead[0]  # still in the deque, so an early close cancels it
            ahead.popleft()
            for each in islice(submitted, 1):
                ahead.append(await each)
    finally:
        for future in ahead:
            future.cancel()


async def async_as_done(
    submitted: Iterator[Awaitable[asyncio.Future[R]]],
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
        await submit(AHEAD_MAX)
        while open_futures:
            future = await done.get()
            open_futures.remove(future)
            yield future
            await submit(1)
    finally:
        for future in open_futures:
            future.cancel()


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
