"""Processes that can be paused, as by SIGSTOP, while the time of the others goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple

from simulation.virtual import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_process: ContextVar["Process | None"] = ContextVar("process", default=None)


class Process:
    """What runs in its ``context``, tasks and timers, waits while it is paused."""

    def __init__(self) -> None:
        self.context = copy_context()
        self.context.run(_process.set, self)
        self._paused = False
        self._held: list[_Callback] = []

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task of this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        for each in held:
            each.call_soon()

    def holds(self, callback: "_Callback") -> bool:
        """Return whether a callback has to wait; then it is called later."""
        if self._paused:
            self._held.append(callback)
        return self._paused


class PausingLoop(VirtualLoop):
    """A loop in virtual time whose processes can be paused."""

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        gated = _Callback(self, callback, args, context or copy_context())
        gated.handle = super().call_soon(gated, context=gated.context)
        return gated.handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        gated = _Callback(self, callback, args, context or copy_context())
        gated.handle = timer = super().call_at(when, gated, context=gated.context)
        return timer


class _Callback:
    """A callback of the loop that waits while its process is paused."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: Context,
    ) -> None:
        self.context = context
        self.handle: asyncio.Handle | None = None
        self._loop = loop
        self._callback = callback
        self._args = args

    def call_soon(self) -> None:
        self._loop.call_soon(self, context=self.context)

    def __call__(self) -> None:
        process = _process.get()
        if process is not None and process.holds(self):
            return
        if self.handle is not None and not self.handle.cancelled():
            self._callback(*self._args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time, with processes that can be paused."""
    loop = PausingLoop()
    with (
        asyncio.Runner(loop_factory=lambda: loop) as runner,
        loop.collecting_garbage(),
    ):
        return runner.run(main)
