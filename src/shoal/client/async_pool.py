"""``shoal.AsyncPool``: ``shoal.Pool`` for coroutines."""

import asyncio
import copy
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, ParamSpec, Self, TypeVar, Unpack, overload

from shoal.client import encoding, map_results, options
from shoal.client.async_calls import AsyncCallFuture, AsyncCalls
from shoal.client.coordinator import find_coordinator
from shoal.client.jobs import AsyncJobs
from shoal.client.pending_calls import CallBuilder, CallNumbers
from shoal.client.workers import AsyncWorkers
from shoal.tasks.values import Ref

P = ParamSpec("P")
R = TypeVar("R")


class AsyncPool:
    """Runs functions on the workers of a coordinator, for coroutines.

    It connects within ``async with``, and belongs to the event loop of that block.
    Leaving the block waits for the open calls; leaving it by an exception cancels them.

        async with shoal.AsyncPool() as pool:
            print(await pool.call(square, 3))
            async for result in pool.map(square, range(1000)):
                print(result)

    The arguments, and what they raise, are those of ``shoal.Pool``.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        durable: bool = True,
        trust_code: bool = False,
        data_dir: str | Path | None = None,
        cacert: str | Path | None = None,
        **unknown: Never,
    ) -> None:
        options.reject_unknown_arguments("shoal.AsyncPool", unknown)
        address = find_coordinator(url, api_key, data_dir=data_dir, cacert=cacert)
        self._trust = trust_code
        self._carrier = AsyncCalls(address)
        self._numbers = CallNumbers()
        self._builder = CallBuilder(options.Options(durable=durable), self._numbers)

    def __repr__(self) -> str:
        return f"<shoal.AsyncPool of {self._carrier.url}>"

    async def __aenter__(self) -> Self:
        await self._carrier.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown(cancel_futures=error is not None)

    def with_options(self, **changes: Unpack[options.OptionChanges]) -> Self:
        """Return a view of this pool whose calls have other options.

        The options, and what they raise, are those of ``shoal.Pool.with_options``.
        ``on_progress`` is called in the event loop.
        """
        view = copy.copy(self)
        view._builder = CallBuilder(
            options.with_changes(self._builder.options, changes), self._numbers
        )
        return view

    @overload
    async def call(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call(self, fn: str, /, *args: Any, **kwargs: Any) -> Any: ...

    async def call(
        self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function on a worker and wait for its result.

        Cancelling the waiting coroutine stops the worker.

        Args:
            fn: the function, or the name of a task.
            args: its arguments; ``docs/tasks.md`` lists the types that can be sent.
            kwargs: its keyword arguments.

        Returns:
            What the function returned.

        Raises:
            Exception: what the function raised.
            ShoalError: the call failed for another reason.
            InvalidRequest: an argument cannot be sent; the message names it.
            TooLarge: the arguments exceed 64 MiB.
            RuntimeError: the pool is not within its ``async with`` block.
        """
        return await (await self._submit(self._function(fn), args, kwargs))

    @overload
    async def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]: ...

    @overload
    async def submit(
        self, fn: str, /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]: ...

    async def submit(
        self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Call a function on a worker, without waiting for its result.

        Waits while the open calls hold more than 256 MiB of arguments.

        Args:
            fn: the function, or the name of a task.
            args: its arguments; ``docs/tasks.md`` lists the types that can be sent.
            kwargs: its keyword arguments.

        Returns:
            A future to await.  Its ``cancel()`` stops the worker, and its ``job_id``
            names the job of a durable call once the coordinator has accepted it (empty
            before).

        Raises:
            InvalidRequest: an argument cannot be sent; the message names it.
            TooLarge: the arguments exceed 64 MiB.
            RuntimeError: the pool is not within its ``async with`` block.
        """
        return await self._submit(self._function(fn), args, kwargs)

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: map_results.MapItems,
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: Literal[False] = False,
    ) -> map_results.AsyncResults[R]: ...

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: map_results.MapItems,
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: Literal[True],
    ) -> map_results.AsyncResults[R | Exception]: ...

    @overload
    def map(
        self,
        fn: str,
        *iterables: map_results.MapItems,
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> map_results.AsyncResults[Any]: ...

    def map(
        self,
        fn: Callable[..., Any] | str,
        *iterables: map_results.MapItems,
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> map_results.AsyncResults[Any]:
        """Call a function for each item, or for each tuple of several iterables' items.

        The calls start when the program first waits for a result: as many at once as
        those of ``shoal.Pool.map``, and another one for each result that it takes, so
        that the iterables may be infinite.  They may also be asynchronous: their items
        are awaited beside the results.  The first exception is raised in its place and
        cancels the remaining calls.

        Args:
            fn: the function, or the name of a task.
            iterables: one for each parameter; the shortest one ends the calls.
            buffersize: as in ``shoal.Pool.map``.
            ordered: yield results in the order of the items, not of completion.
            return_exceptions: yield exceptions in the place of results.

        Returns:
            An object for ``await``, which gives a list of all results, or for ``async
            for``, which gives one after the other.
        """
        function = self._function(fn)
        window = map_results.MapWindow(iterables, buffersize)
        if any(isinstance(each, AsyncIterable) for each in iterables):
            submitting = self._submit_each(function, iterables)
            ended = map_results.async_from_source(submitting, window, ordered=ordered)
        else:
            submitted = (
                self._submit(function, args, {}, index)
                for index, args in enumerate(zip(*iterables, strict=False))
            )
            ended = (
                map_results.async_in_order if ordered else map_results.async_as_done
            )(submitted, window)
        return map_results.AsyncResults(
            map_results.async_outcomes(ended, return_exceptions=return_exceptions)
        )

    async def as_completed(
        self, fs: Iterable[asyncio.Future[R]]
    ) -> AsyncIterator[asyncio.Future[R]]:
        """Yield futures as they complete, each of them once.

        Args:
            fs: futures that ``submit`` returned.
        """
        done: asyncio.Queue[asyncio.Future[R]] = asyncio.Queue()
        waited = set(fs)
        for future in waited:
            future.add_done_callback(done.put_nowait)
        for _ in waited:
            yield await done.get()

    async def put(self, value: object) -> Ref:
        """Upload a value to the coordinator once, for use in many calls.

        The argument, the result and what is raised are those of ``shoal.Pool.put``.
        """
        blob = await asyncio.to_thread(encoding.encode_value, value)
        await self._carrier.channel.put(blob)
        return Ref(blob.digest)

    @property
    def jobs(self) -> AsyncJobs:
        """Asynchronous jobs: submit, price, show, await, list and cancel them."""
        return AsyncJobs(self._carrier.request)

    @property
    def workers(self) -> AsyncWorkers:
        """The workers, for operators: list, pause, resume, drain and remove them."""
        return AsyncWorkers(self._carrier.request)

    async def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and wait for the open ones.

        Args:
            cancel_futures: cancel the open calls first.
        """
        await self._carrier.stop(cancel=cancel_futures)

    def _function(self, fn: Callable[..., Any] | str) -> encoding.RemoteFunction:
        return encoding.remote_function(fn, trust=self._trust)

    async def _submit(
        self,
        function: encoding.RemoteFunction,
        args: Sequence[object],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> asyncio.Future[Any]:
        if encoding.is_small(args) and encoding.is_small(kwargs):
            arguments = encoding.encode_arguments(function, args, kwargs)
        else:  # hashing and copying take their time
            arguments = await asyncio.to_thread(
                encoding.encode_arguments, function, args, kwargs
            )
        future = AsyncCallFuture(function.read, self._carrier)
        call = self._builder.build_with_alternatives(
            function, arguments, future.on_ended, len(args), index
        )
        await self._carrier.submit(future, call)
        return future

    async def _submit_each(
        self,
        function: encoding.RemoteFunction,
        iterables: Sequence[map_results.MapItems],
    ) -> AsyncGenerator[asyncio.Future[Any], None]:
        index = 0
        async with aclosing(map_results.zip_async(iterables)) as zipped:
            async for args in zipped:
                yield await self._submit(function, args, {}, index)
                index += 1
