"""``shoal.Pool``: the workers of a coordinator as a ``concurrent.futures.Executor``."""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from itertools import islice
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Never, ParamSpec, Self, TypeVar, Unpack, overload

from shoal.client.background import Background
from shoal.client.call_future import CallFuture
from shoal.client.options import Changes, Options, changed, refuse_unknown
from shoal.client.packing import Function, function_of, pack_call, pack_value
from shoal.client.place import find
from shoal.client.tasks import Tasks
from shoal.client.terms import Numbers, Terms
from shoal.client.windows import as_they_come, in_order, outcomes, results
from shoal.tasks.values import Ref

P = ParamSpec("P")
R = TypeVar("R")

AHEAD_MAX = 8192  # calls of a ``map`` that are out, beyond those whose results were had


class Pool(Executor):
    """Calls functions on the workers of a coordinator.

    A ``shoal.task`` is called by its name, and so is a name that is given as text; any
    other function is sent along, to workers that were started with ``--trust-code``.
    It may be used by several threads, not by a process that was forked from its own.

    Leaving its block waits for the calls that are open; leaving it by an error, such as
    Ctrl-C, cancels them.

    Args:
        url: the coordinator's; else SHOAL_URL, else the one of this machine.
        api_key: else SHOAL_API_KEY, else that of the coordinator of this machine.
        durable: whether calls are jobs, which survive the loss of whatever there is;
            without, they are several times as fast.
        trust_code: whether results may be pickled, which is to let workers run what
            they want in this process.
        data_dir: the folder of the coordinator of this machine.
        cacert: whose certificates are good, in PEM form; else SHOAL_CACERT, else the
            system's.

    Raises ConfigError if there is no key, or another thing makes no sense.
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
        refuse_unknown("shoal.Pool", unknown)
        place = find(url, api_key, data_dir=data_dir, cacert=cacert)
        self._trust = trust_code
        self._shared = _Shared(Background(place), Numbers())
        self._terms = Terms(Options(durable=durable), self._shared.numbers)

    def __repr__(self) -> str:
        return f"<shoal.Pool of {self._shared.background.url}>"

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        self.shutdown(cancel_futures=exc_val is not None)
        return None

    def with_options(self, **changes: Unpack[Changes]) -> Self:
        """Return the same pool, on other terms: ``shoal.client.options.Options``.

        Raises InvalidRequest if they make no sense, TypeError if there is no such
        option.
        """
        view = copy.copy(self)
        options = changed(self._terms.options, changes)
        view._terms = Terms(options, self._shared.numbers)
        return view

    @overload
    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...

    @overload
    def submit(self, fn: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...

    def submit(
        self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Have a function called; return what will become of it.

        Waits while the calls that are open take more than 256 MiB.

        Raises InvalidRequest naming an argument that cannot be sent, RuntimeError after
        ``shutdown``.
        """
        return self._submit(function_of(fn, trust=self._trust), args, kwargs)

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        ordered: bool = True,
        return_exceptions: Literal[False] = False,
    ) -> Iterator[R]: ...

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        ordered: bool = True,
        return_exceptions: Literal[True],
    ) -> list[R | Exception]: ...

    @overload
    def map(
        self,
        fn: str,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Any: ...

    def map(
        self,
        fn: Callable[..., Any] | str,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any] | list[Any]:
        """Call a function for each item, or for what several iterables have together.

        The calls begin at once, as far as 8192 of them; as results are taken, further
        ones follow, so that the iterables may be endless.  The first error is raised in
        its place, and cancels what is left.

        Args:
            timeout: seconds from now on until the last result, else TimeoutError.
            chunksize: of no effect: calls share messages in any case.
            ordered: results come in the order of the items; else as they come.
            return_exceptions: return a list of all, with errors in their places.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        function = function_of(fn, trust=self._trust)
        items = enumerate(zip(*iterables, strict=False))
        submitted = (self._submit(function, args, {}, index) for index, args in items)
        deadline = None if timeout is None else monotonic() + timeout
        ahead = deque(islice(submitted, AHEAD_MAX))
        window = (
            in_order(ahead, submitted)
            if ordered
            else as_they_come(ahead, submitted, deadline)
        )
        if return_exceptions:
            return list(outcomes(window, deadline))
        return results(window, deadline)

    def as_completed(
        self, fs: Iterable[Future[R]], timeout: float | None = None
    ) -> Iterator[Future[R]]:
        """Yield futures as they complete, as ``concurrent.futures.as_completed``."""
        return futures.as_completed(fs, timeout)

    def put(self, value: object) -> Ref:
        """Give a large value to the coordinator, once; return what stands for it.

        It stands for it in arguments of any later call, also in lists and maps there,
        as long as the coordinator keeps it: some gigabytes of those used last.

        Raises InvalidRequest if it cannot be sent, ShoalError if it is not taken.
        """
        blob = pack_value(value)
        self._shared.background.put(blob)
        return Ref(blob.digest)

    def tasks(self) -> Tasks:
        """Return which functions the workers have, and their slots.

        Raises ShoalError.
        """
        return self._shared.background.tasks()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, on whatever terms, and wait for those that are open.

        Without ``wait`` they go on in the background.  What ends the wait, such as
        Ctrl-C, cancels them.
        """
        background = self._shared.background
        background.stop()
        if cancel_futures:
            background.cancel_all()
        if wait:
            background.finish()

    def _submit(
        self,
        function: Function,
        args: Sequence[object],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> Future[Any]:
        background = self._shared.background
        future = CallFuture(function.read, background)
        parcel = pack_call(function, args, kwargs)
        asked = self._terms.asked(function, parcel, future.ended, index)
        future.asked = asked
        background.ask(future, asked)
        return future


class _Shared:
    """What all views of a pool have in common; the thread ends when they are gone."""

    def __init__(self, background: Background, numbers: Numbers) -> None:
        self.background = background
        self.numbers = numbers
        weakref.finalize(self, background.stop).atexit = False
