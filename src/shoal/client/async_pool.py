"""``shoal.AsyncPool``: what ``shoal.Pool`` does, for coroutines."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, ParamSpec, Self, TypeVar, Unpack, overload

from shoal.client.carrier import AwaitedCall, Carrier
from shoal.client.mapped import Mapped, as_they_come, in_order, outcomes
from shoal.client.options import Changes, Options, changed, refuse_unknown
from shoal.client.packing import (
    Function,
    function_of,
    is_small,
    pack_call,
    pack_value,
)
from shoal.client.place import find
from shoal.client.terms import Numbers, Terms
from shoal.tasks.values import Ref

P = ParamSpec("P")
R = TypeVar("R")


class AsyncPool:
    """Calls functions on the workers of a coordinator, within ``async with``.

    The arguments are those of ``shoal.Pool``.  Leaving the block waits for the calls
    that are open; leaving it by an error cancels them.
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
        refuse_unknown("shoal.AsyncPool", unknown)
        place = find(url, api_key, data_dir=data_dir, cacert=cacert)
        self._trust = trust_code
        self._carrier = Carrier(place)
        self._numbers = Numbers()
        self._terms = Terms(Options(durable=durable), self._numbers)

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

    def with_options(self, **changes: Unpack[Changes]) -> Self:
        """Return the same pool, on other terms: ``shoal.client.options.Options``.

        Raises InvalidRequest if they make no sense, TypeError if there is no such
        option.
        """
        view = copy.copy(self)
        view._terms = Terms(changed(self._terms.options, changes), self._numbers)
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
        """Call a function; return its value, or raise what it raised.

        Cancelling it stops the worker.
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
        """Have a function called; return what will become of it.

        Waits while the calls that are open take more than 256 MiB.  Raises as
        ``shoal.Pool.submit`` does.
        """
        return await self._submit(self._function(fn), args, kwargs)

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: Literal[False] = False,
    ) -> Mapped[R]: ...

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: Literal[True],
    ) -> Mapped[R | Exception]: ...

    @overload
    def map(
        self,
        fn: str,
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Mapped[Any]: ...

    def map(
        self,
        fn: Callable[..., Any] | str,
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Mapped[Any]:
        """Call a function for each item, or for what several iterables have together.

        What is returned can be awaited, for a list of all results, or iterated over
        with ``async for``, which begins the calls.  Otherwise as ``shoal.Pool.map``.
        """
        function = self._function(fn)
        submitted = (
            self._submit(function, args, {}, index)
            for index, args in enumerate(zip(*iterables, strict=False))
        )
        window = (in_order if ordered else as_they_come)(submitted)
        return Mapped(outcomes(window, return_exceptions=return_exceptions))

    async def as_completed(
        self, fs: Iterable[asyncio.Future[R]]
    ) -> AsyncIterator[asyncio.Future[R]]:
        """Yield futures as they complete."""
        done: asyncio.Queue[asyncio.Future[R]] = asyncio.Queue()
        waited = set(fs)
        for future in waited:
            future.add_done_callback(done.put_nowait)
        for _ in waited:
            yield await done.get()

    async def put(self, value: object) -> Ref:
        """Give a large value to the coordinator, once; return what stands for it.

        As ``shoal.Pool.put``.
        """
        blob = await asyncio.to_thread(pack_value, value)
        await self._carrier.conversation.put(blob)
        return Ref(blob.digest)

    async def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and wait for those that are open."""
        await self._carrier.stop(cancel=cancel_futures)

    def _function(self, fn: Callable[..., Any] | str) -> Function:
        return function_of(fn, trust=self._trust)

    async def _submit(
        self,
        function: Function,
        args: Sequence[object],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> asyncio.Future[Any]:
        if is_small(args) and is_small(kwargs):
            parcel = pack_call(function, args, kwargs)
        else:  # hashing and copying take their time
            parcel = await asyncio.to_thread(pack_call, function, args, kwargs)
        future = AwaitedCall(function.read, self._carrier)
        asked = self._terms.asked(function, parcel, future.ended, index)
        await self._carrier.ask(future, asked)
        return future
