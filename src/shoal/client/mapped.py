"""The results of a ``map`` for coroutines; leaving them early cancels what is left."""

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Generator,
    Iterator,
)
from contextlib import aclosing
from itertools import islice
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")

AHEAD_MAX = 8192  # calls that are out, beyond those whose results were had


class Mapped(Generic[T]):
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


async def in_order(
    submitted: Iterator[Awaitable[asyncio.Future[R]]],
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures as they are submitted, and submit another for each."""
    ahead: deque[asyncio.Future[R]] = deque()
    try:
        for each in islice(submitted, AHEAD_MAX):
            ahead.append(await each)
        while ahead:
            yield ahead[0]  # which is cancelled as well if that is the last
            ahead.popleft()
            for each in islice(submitted, 1):
                ahead.append(await each)
    finally:
        for future in ahead:
            future.cancel()


async def as_they_come(
    submitted: Iterator[Awaitable[asyncio.Future[R]]],
) -> AsyncGenerator[asyncio.Future[R], None]:
    """Yield futures when they are done, and submit another for each."""
    out: set[asyncio.Future[R]] = set()
    done: asyncio.Queue[asyncio.Future[R]] = asyncio.Queue()

    async def submit(number: int) -> None:
        for each in islice(submitted, number):
            future = await each
            out.add(future)
            future.add_done_callback(done.put_nowait)

    try:
        await submit(AHEAD_MAX)
        while out:
            future = await done.get()
            out.remove(future)
            yield future
            await submit(1)
    finally:
        for future in out:
            future.cancel()


async def outcomes(
    window: AsyncGenerator[asyncio.Future[R], None], *, return_exceptions: bool
) -> AsyncGenerator[R | Exception, None]:
    """Yield results, or what calls raised; without ``return_exceptions`` raise it."""
    async with aclosing(window):
        async for future in window:
            try:
                yield await future
            except Exception as error:
                if not return_exceptions:
                    raise
                yield error
