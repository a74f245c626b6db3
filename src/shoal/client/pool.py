"""``shoal.Pool``: the workers of a coordinator as a ``concurrent.futures.Executor``."""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Never, ParamSpec, Self, TypeVar, Unpack, overload

from shoal.client import encoding, map_results
from shoal.client.availability import TASKS, TaskList
from shoal.client.coordinator import find_coordinator
from shoal.client.jobs import Jobs
from shoal.client.options import (
    OptionChanges,
    Options,
    reject_unknown_arguments,
    with_changes,
)
from shoal.client.pending_calls import CallBuilder, CallNumbers
from shoal.client.threaded_calls import CallFuture, ThreadedCalls
from shoal.client.workers import Workers
from shoal.tasks.values import Ref

P = ParamSpec("P")
R = TypeVar("R")


class Pool(Executor):
    """An executor that runs functions on the workers of a coordinator.

    A function that ``shoal.task`` decorates is called by its name, and a text is such a
    name.  Any other function, such as a lambda, is pickled and sent; only workers that
    were started with ``--trust-code`` run it.

    Leaving the ``with`` block waits for the open calls.  Leaving it by an exception,
    such as KeyboardInterrupt, cancels them.

    Threads can share a pool.  A forked process cannot use its parent's: create a pool
    in each process.

    Args:
        url: URL of the coordinator; several of one pool, separated by commas, are tried
            in turn.  Default: ``SHOAL_URL``, else the coordinator of this machine.
        api_key: API key.  Default: ``SHOAL_API_KEY``, else the key in the data folder
            of the coordinator of this machine.
        durable: store each call as a job, which survives the loss of its worker and a
            restart of the coordinator.  False keeps calls in memory, which is several
            times as fast.
        trust_code: unpickle results, so that workers can run any code in this process.
        data_dir: data folder of the coordinator of this machine.  Default:
            ``SHOAL_DATA_DIR``, that of the settings file, or the user's.
        cacert: PEM file with the certificates of trusted authorities.  Default:
            ``SHOAL_CACERT``, else the system's.

    Raises:
        ConfigError: there is no API key, or an argument or variable is invalid.
        TypeError: there is no such argument.
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
        reject_unknown_arguments("shoal.Pool", unknown)
        address = find_coordinator(url, api_key, data_dir=data_dir, cacert=cacert)
        self._trust = trust_code
        self._shared = _Shared(ThreadedCalls(address), CallNumbers())
        self._builder = CallBuilder(Options(durable=durable), self._shared.numbers)

    def __repr__(self) -> str:
        return f"<shoal.Pool of {self._shared.carrier.url}>"

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        self.shutdown(cancel_futures=exc_val is not None)
        return None

    def with_options(self, **changes: Unpack[OptionChanges]) -> Self:
        """Return a view of this pool whose calls have other options.

        The view shares the connection, and options that are not named keep their value.

        Args:
            timeout: seconds that a call may run, at most 86,400; then its process is
                killed and it raises ``TaskTimeout``.  None: the task's own timeout.
            queue: seconds that a call may wait for a worker, at most 86,400; then it
                raises ``TaskTimeout``.  None: the coordinator's limit.
            priority: ``"low"``, ``"normal"`` or ``"high"``; calls of a higher priority
                always go first.
            durable: store each call as a job, or keep it in memory.
            key: idempotency key, at most 240 characters.  A later call with the same
                key, also of another program, returns the first one's result and runs
                nothing.  Calls of a ``map`` have the keys ``key/0``, ``key/1``, ….
            on_progress: called with the share and the remark that the function passes
                to ``shoal.progress``, in the pool's thread.  Its exceptions are logged.
                Only for durable calls without a key.
            retry: after a lost connection, send calls that are not durable again; they
                may run twice.
            gang: the call's rank among calls that start together, each on another
                machine; for programs that start training runs.  Only for durable calls.

        Raises:
            InvalidRequest: an option is invalid, or two exclude each other.
            TypeError: there is no such option.
        """
        view = copy.copy(self)
        options = with_changes(self._builder.options, changes)
        view._builder = CallBuilder(options, self._shared.numbers)
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
        """Call a function on a worker.

        Blocks while the open calls hold more than 256 MiB of arguments.

        Args:
            fn: the function, or the name of a task.
            args: its arguments; ``docs/tasks.md`` lists the types that can be sent.
            kwargs: its keyword arguments.

        Returns:
            A future.  Its ``cancel()`` stops the worker, its ``job_id`` names the job
            of a durable call once the coordinator has accepted it (empty before), and
            its ``running()`` is true once a worker has a durable call without a key.
            Its ``result()`` raises what the function raised, or a ``ShoalError``.

        Raises:
            InvalidRequest: an argument cannot be sent; the message names it.
            TooLarge: the arguments exceed 64 MiB.
            RuntimeError: the pool was shut down, or the process was forked.
        """
        return self._submit(
            encoding.remote_function(fn, trust=self._trust), args, kwargs
        )

    @overload
    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
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
        buffersize: int | None = None,
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
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Any: ...

    def map(
        self,
        fn: Callable[..., Any] | str,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any] | list[Any]:
        """Call a function for each item, or for each tuple of several iterables' items.

        The first 8192 calls start at once, and another one for each result that the
        program takes, so that the iterables may be infinite.  If no iterable has a
        length, the first 64 start at once, and two for each result, up to 8192 at a
        time.  ``buffersize`` replaces all these numbers.  The first exception is raised
        in its place and cancels the remaining calls.

        Args:
            fn: the function, or the name of a task.
            iterables: one for each parameter; the shortest one ends the calls.
            timeout: seconds from this call to the last result; then TimeoutError.
            chunksize: no effect, since small calls share messages in any case; at
                least 1.
            buffersize: calls at a time whose results the program has not taken.
            ordered: yield results in the order of the items, not of completion.
            return_exceptions: wait for all calls and return a list, with exceptions in
                the place of results.

        Returns:
            An iterator over the results.  Closing it cancels the remaining calls.

        Raises:
            InvalidRequest: an argument cannot be sent; the message names it.
            RuntimeError: the pool was shut down, or the process was forked.
            ValueError: ``chunksize`` or ``buffersize`` is below 1.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        window = map_results.MapWindow(iterables, buffersize)
        function = encoding.remote_function(fn, trust=self._trust)
        items = enumerate(zip(*iterables, strict=False))
        submitted = (self._submit(function, args, {}, index) for index, args in items)
        deadline = None if timeout is None else monotonic() + timeout
        ahead = deque(islice(submitted, window.size))
        ended = (
            map_results.in_order(ahead, submitted, window)
            if ordered
            else map_results.as_done(ahead, submitted, window, deadline)
        )
        if return_exceptions:
            return list(map_results.outcomes(ended, deadline))
        return map_results.results(ended, deadline)

    def as_completed(
        self, fs: Iterable[Future[R]], timeout: float | None = None
    ) -> Iterator[Future[R]]:
        """Yield futures as they complete, as ``concurrent.futures.as_completed`` does.

        Args:
            fs: futures of this or another pool.
            timeout: seconds from this call to the last future; then TimeoutError.
        """
        return map_results.as_completed(fs, timeout)

    def put(self, value: object) -> Ref:
        """Upload a value to the coordinator once, for use in many calls.

        Args:
            value: what can be an argument, up to 256 MiB.

        Returns:
            A reference.  It replaces the value in the arguments of later calls, also
            within lists and dictionaries.  The coordinator keeps some gigabytes of
            values and evicts the least recently used first.

        Raises:
            InvalidRequest: the value cannot be sent.
            TooLarge: the value exceeds 256 MiB.
            ShoalError: the coordinator does not accept it, or is unreachable.
        """
        blob = encoding.encode_value(value)
        self._shared.carrier.put(blob)
        return Ref(blob.digest)

    def tasks(self) -> TaskList:
        """List the tasks of all connected workers.

        Returns:
            ``tasks``, each with its ``name`` and the number of ``workers`` that have it
            and of their ``slots``; the numbers of all ``workers`` that call functions
            and of their ``slots``; ``code``, how many of these workers run functions
            that clients send; and ``unnamed``, how many do not list their functions.

        Raises:
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._shared.carrier.request(TASKS)

    @property
    def jobs(self) -> Jobs:
        """Asynchronous jobs: submit, price, show, await, list and cancel them."""
        return Jobs(self._shared.carrier.request)

    @property
    def workers(self) -> Workers:
        """The workers, for operators: list, pause, resume, drain and remove them."""
        return Workers(self._shared.carrier.request)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, from any view, and wait for the open ones.

        An exception that ends the wait, such as KeyboardInterrupt, cancels them.

        Args:
            wait: block until the open calls have ended; else they continue in the
                background.
            cancel_futures: cancel the open calls first.
        """
        carrier = self._shared.carrier
        carrier.stop()
        if cancel_futures:
            carrier.cancel_all()
        if wait:
            carrier.finish()

    def _submit(
        self,
        function: encoding.RemoteFunction,
        args: Sequence[object],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> Future[Any]:
        carrier = self._shared.carrier
        future = CallFuture(function.read, carrier)
        arguments = encoding.encode_arguments(function, args, kwargs)
        future.call = self._builder.build_with_alternatives(
            function, arguments, future.on_ended, len(args), index
        )
        carrier.submit(future, future.call)
        return future


class _Shared:
    """What all views of a pool have in common; the thread ends when they are gone."""

    def __init__(self, carrier: ThreadedCalls, numbers: CallNumbers) -> None:
        self.carrier = carrier
        self.numbers = numbers
        weakref.finalize(self, carrier.stop).atexit = False
