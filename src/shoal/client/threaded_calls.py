"""The thread that carries the calls of a ``Pool``, and their futures.

Calls are handed over in bursts: the loop is woken once for all that are submitted while
it is busy.
"""

import asyncio
import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import ClientSession

from shoal.client.availability import TaskList, fetch_tasks
from shoal.client.blobs import Blob
from shoal.client.call_channel import CallChannel
from shoal.client.coordinator import CoordinatorAddress, open_session
from shoal.client.encoding import ReadResult
from shoal.client.errors import ConnectionLost
from shoal.client.pending_calls import (
    CallCarrier,
    CallMemory,
    ClientCall,
    resolve_future,
)
from shoal.transports.clock import fast_loop_factory


class CallFuture(Future[Any]):
    """What will become of a call; cancelling it stops the worker.

    ``job_id`` names its job once the coordinator has accepted it, if it is durable; and
    ``running`` is true from when a worker has it.
    """

    def __init__(self, read: ReadResult, carrier: CallCarrier) -> None:
        super().__init__()
        self.read = read
        self.carrier = carrier
        self.call: ClientCall | None = None  # once it is submitted

    @property
    def job_id(self) -> str:
        """The id of its job; empty: there is none, or not yet."""
        return "" if self.call is None else self.call.job_id

    def running(self) -> bool:
        # That of the base class is for calls that cannot be cancelled any more.
        return self.call is not None and self.call.started and not self.done()

    def cancel(self) -> bool:
        # Whoever releases the call says what becomes of it, and nobody else does.
        if self.call is None or not self.carrier.release(self.call):
            return self.cancelled()
        self.carrier.drop(self.call)
        self.set_cancelled()
        return True

    def on_ended(self, value: bytes | None, error: Exception | None) -> None:
        resolve_future(self, value, error)

    def set_cancelled(self, reason: str = "") -> None:
        super().cancel()
        self.set_running_or_notify_cancel()


T = TypeVar("T")

FORKED = (
    "this pool was made before the process was forked, and its connection stayed with "
    "the parent: make a shoal.Pool in each process, or use the 'spawn' start method"
)


class ThreadedCalls:
    """Carries calls in a thread of its own, from the first until ``stop``."""

    def __init__(self, place: CoordinatorAddress) -> None:
        self._place = place
        self._process = os.getpid()
        # Guards what is below it; whoever waits waits for room.
        self._room = threading.Condition()
        self._held = CallMemory()
        self._open: dict[int, CallFuture] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None
        # Handed over without a lock: appending and taking are atomic.
        self._incoming: deque[Callable[[], None]] = deque()
        self._told = False
        self._loop: asyncio.AbstractEventLoop
        self._session: ClientSession
        self._conversation: CallChannel

    @property
    def url(self) -> str:
        """The coordinator's."""
        return self._place.url

    def submit(self, future: CallFuture, asked: ClientCall) -> None:
        """Have a call made; wait while the open ones hold too much memory.

        Raises RuntimeError after ``stop``, or in a process that was forked.
        """
        with self._room:
            self._check()
            while not self._held.add(asked):
                if self._in_thread():  # in a callback, which may hold up nothing
                    self._held.add(asked, force=True)
                    break
                self._room.wait()
                self._check()
            self._open[asked.number] = future
        self._hand_over(lambda: self._conversation.submit(asked))

    def release(self, asked: ClientCall) -> bool:
        """Count a call as ended; False if it was already."""
        with self._room:
            if self._open.pop(asked.number, None) is None:
                return False
            self._held.remove(asked)
            self._room.notify_all()
        return True

    def drop(self, asked: ClientCall) -> None:
        """Stop a call: nobody waits for it any more."""
        with suppress(RuntimeError):  # the loop has ended, and with it all calls
            self._hand_over(lambda: self._conversation.drop(asked))

    def put(self, blob: Blob) -> None:
        """Give a large value to the coordinator.  Raises as ``BlobClient.upload``
        does."""
        self._run(lambda: self._conversation.put(blob))

    def tasks(self) -> TaskList:
        """Ask which functions there are.  Raises as ``fetch_tasks`` does."""
        return self._run(lambda: fetch_tasks(self._session, self._place))

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the thread, and wait for it."""
        with self._room:
            self._check()
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def cancel_all(self) -> None:
        """Cancel what has not ended."""
        with self._room:
            futures = [*self._open.values()]
        for future in futures:
            future.cancel()

    def stop(self) -> None:
        """Take no more calls, and end the thread when all that there are have ended."""
        with self._room:
            if self._stopped:
                return
            self._stopped = True
            self._room.notify_all()
            if self._thread is None:
                return
        self._hand_over(lambda: self._conversation.close())

    def finish(self) -> None:
        """Stop, and wait until the thread has ended.

        What ends the wait, such as Ctrl-C, cancels what has not ended.
        """
        self.stop()
        if self._thread is None or self._in_thread():
            return
        try:
            self._thread.join()
        except BaseException:
            self.cancel_all()
            raise

    def _check(self) -> None:
        """Start the thread if there is none; the caller holds the lock."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self._stopped:
            raise RuntimeError("the pool was shut down: make another shoal.Pool")
        if self._thread is None:
            started = threading.Event()
            self._thread = threading.Thread(
                target=self._carry, args=(started,), name="shoal-pool", daemon=True
            )
            self._thread.start()
            started.wait()

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _hand_over(self, what: Callable[[], None]) -> None:
        self._incoming.append(what)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._told = False  # before the first is taken: what comes later wakes again
        while self._incoming:
            self._incoming.popleft()()

    def _carry(self, started: threading.Event) -> None:
        # A pool that nobody shuts down is finished when the program ends.
        atexit.register(self._finish_at_exit)
        try:
            with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
                runner.run(self._converse(started))
        finally:
            atexit.unregister(self._finish_at_exit)
            self._abandon()

    def _finish_at_exit(self) -> None:
        self.stop()
        if hasattr(sys, "last_value"):  # the program ended by an error, or by Ctrl-C
            self.cancel_all()
        self.finish()

    def _abandon(self) -> None:
        """Leave nobody waiting; there is something open only after a bug."""
        with self._room:
            self._stopped = True
            futures = [*self._open.values()]
        for future in futures:
            future.on_ended(None, ConnectionLost("the pool broke down: make another"))

    async def _converse(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        async with open_session(self._place) as self._session:
            self._conversation = CallChannel(self._session, self._place)
            started.set()
            await self._conversation.run()
