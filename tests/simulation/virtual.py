"""An event loop whose time passes only when nothing is left to do at the moment."""

import asyncio
import gc
import math
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP = 0.01  # seconds
COLLECT_EVERY = 60.0  # virtual seconds between collections of garbage
END = 5 * 3600.0  # seconds; by then, every time limit of every job has passed


class NeverEnds(BaseException):
    """Raised where what is waited for does not happen, however long it takes."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting for the next timer, goes to its time at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.collect_at = math.inf
        self._end = END

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        # In steps, so that a turn of the loop has more than one thing to do.
        self.now += math.ceil(max(timeout, 0.0) / STEP) * STEP
        if self.now >= self.collect_at:
            gc.collect()
            self.collect_at = self.now + COLLECT_EVERY
        if self.now > self._end:
            self._end = math.inf  # everything is cancelled now, which may take time
            raise NeverEnds(f"after {END:g} s, these still wait:\n{_waiting()}")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time: no sockets, no threads, no waiting."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    @contextmanager
    def collecting_garbage(self) -> Iterator[None]:
        """Collect garbage at virtual times only, for the length of the block.

        What is referred to weakly is then there for as long in every process, whatever
        it has allocated before.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        self._jump.collect_at = self._jump.now + COLLECT_EVERY
        try:
            yield
        finally:
            self._jump.collect_at = math.inf
            gc.enable()
            gc.unfreeze()

    def spend(self, seconds: float) -> None:
        """Let time pass while a callback runs, as if it computed for so long."""
        self._jump.now += seconds

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run ``func`` at once, in no time; its caller goes on a turn later."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def _waiting() -> str:
    """Return for what the tasks of the running loop wait, and how many for each."""
    waits: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        frames: list[str] = []
        waiting: object = task.get_coro()
        while isinstance(waiting, CoroutineType) and waiting.cr_frame is not None:
            name, line = waiting.__qualname__, waiting.cr_frame.f_lineno
            frames.append(f"{name}, line {line}")
            waiting = waiting.cr_await
        waits[" > ".join(frames)] += 1
    return "\n".join(f"{count} of {where}" for where, count in waits.most_common())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(
    test: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, None]:
    """Run an async test to its end in virtual time."""

    @wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


def scripted(
    run: Callable[[Callable[P, Coroutine[Any, Any, None]]], None],
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Make a script a test without parameters: ``run`` gives it what it needs."""

    def decorate(script: Callable[P, Coroutine[Any, Any, None]]) -> Callable[[], None]:
        return lambda: run(script)

    return decorate
