"""The thread that sends the calls of a ``Pool``, and their futures.

Calls are passed to its loop in batches: one wake-up serves all calls that are submitted
while the loop is busy.
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

from shoal.client import pending_calls
from shoal.client.call_channel import CallChannel
from shoal.client.connection import Blob, JsonRequest, ResultRequest, open_session
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.encoding import ReadResult
from shoal.client.errors import ConnectionLost
from shoal.client.map_results import wait_for
from shoal.tasks.running_call import runs_tasks, slot_lent
from shoal.transports.clock import fast_loop_factory


class CallFuture(Future[Any]):
    """The future result of a call; cancelling it stops the worker.

    ``job_id`` is set once the coordinator has accepted a durable call, and ``running``
    is true once a worker has it.
    """

    def __init__(self, read: ReadResult, carrier: pending_calls.CallCarrier) -> None:
        super().__init__()
        self.read = read
        self.carrier = carrier
        self.call: pending_calls.ClientCall | None = None  # once it is submitted

    @property
    def job_id(self) -> str:
        """The id of its job; empty: there is none, or not yet."""
        return "" if self.call is None else self.call.job_id

    def running(self) -> bool:
        # The base class means calls that cannot be cancelled any more.
        return self.call is not None and self.call.started and not self.done()

    def result(self, timeout: float | None = None) -> Any:
        return super().result(wait_for(self, timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(wait_for(self, timeout))

    def cancel(self) -> bool:
        # The thread that releases the call sets its result.
        if self.call is None or not self.carrier.release(self.call):
            return self.cancelled()
        self.carrier.drop(self.call)
        self.set_cancelled()
        return True

    def on_ended(self, value: bytes | None, error: Exception | None) -> None:
        pending_calls.resolve_future(self, value, error)

    def set_cancelled(self, reason: str = "") -> None:
        super().cancel()
        self.set_running_or_notify_cancel()


T = TypeVar("T")

FORKED = (
    "this process was forked after the pool was created, and the parent has the "
    "connection: create a shoal.Pool in each process, or use the 'spawn' start method"
)


LEAVE_TIMEOUT = 2.0  # seconds for the thread to end without waiting for others


class ThreadedCalls:
    """Sends calls in a thread, which runs from the first call until ``stop``.

    It has to end before the interpreter: uvloop's callbacks crash after that.
    """

    def __init__(self, address: CoordinatorAddress) -> None:
        self._address = address
        self._process = os.getpid()
        # Guards the attributes below; submissions wait on it for room.
        self._condition = threading.Condition()
        self._memory = pending_calls.CallMemory()
        self._open: dict[int, CallFuture] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None
        # Passed without a lock: append and popleft are atomic.
        self._actions: deque[Callable[[], None]] = deque()
        self._wakeup_pending = False
        self._loop: asyncio.AbstractEventLoop
        self._serving: asyncio.Task[None]
        self._session: ClientSession
        self._channel: CallChannel

    @property
    def url(self) -> str:
        """The coordinator's."""
        return self._address.url

    def submit(self, future: CallFuture, call: pending_calls.ClientCall) -> None:
        """Send a call, after waiting while open calls hold too much memory.

        Raises RuntimeError after ``stop``, or in a process that was forked.
        """
        with self._condition:
            self._ensure_running()
            while not self._memory.add(call):
                if self._in_thread():  # in a callback, which must not block
                    self._memory.add(call, force=True)
                    break
                self._condition.wait()
                self._ensure_running()
            self._open[call.number] = future
        self._run_in_loop(lambda: self._channel.submit(call))

    def release(self, call: pending_calls.ClientCall) -> bool:
        """Count a call as ended; False if it was already."""
        with self._condition:
            if self._open.pop(call.number, None) is None:
                return False
            self._memory.remove(call)
            self._condition.notify_all()
        return True

    def drop(self, call: pending_calls.ClientCall) -> None:
        """Cancel a call whose result is not wanted any more."""
        with suppress(RuntimeError):  # the loop has ended, with all calls
            self._run_in_loop(lambda: self._channel.drop(call))

    def replace(
        self, old: pending_calls.ClientCall, new: pending_calls.ClientCall
    ) -> bool:
        """Send a call in the place of one that has ended; False if it was cancelled."""
        with self._condition:
            future = self._open.pop(old.number, None)
            if future is None:
                return False
            self._memory.remove(old)
            self._memory.add(new, force=True)
            self._open[new.number] = future
        self._channel.submit(new)
        return True

    def put(self, blob: Blob) -> None:
        """Upload a large value.  Raises as ``BlobClient.upload`` does."""
        self._run(lambda: self._channel.put(blob))

    def request(self, request: "JsonRequest[T] | ResultRequest[T]") -> T:
        """Send a request.  Raises as its ``send`` does."""
        return self._run(lambda: request.send(self._session, self._address))

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the thread, and wait for it."""
        with self._condition:
            self._ensure_running()
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def cancel_all(self) -> None:
        """Cancel all open calls."""
        with self._condition:
            futures = [*self._open.values()]
        for future in futures:
            future.cancel()

    def stop(self) -> None:
        """Accept no more calls, and end the thread after the open ones."""
        with self._condition:
            if self._stopped:
                return
            self._stopped = True
            self._condition.notify_all()
            if self._thread is None:
                return
        self._run_in_loop(lambda: self._channel.close())

    def abandon(self) -> None:
        """Stop, without the open calls; those that outlive their client go on."""
        self.stop()
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended, with all calls
                self._run_in_loop(lambda: self._channel.abandon())
            self._thread.join()

    def leave(self) -> None:
        """Disconnect at once: whether what was sent has had an effect is not known."""
        self._stopped = True
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(LEAVE_TIMEOUT)

    def finish(self) -> None:
        """Stop, and wait until the thread has ended.

        An exception that ends the wait, such as KeyboardInterrupt, cancels open calls.
        """
        self.stop()
        if self._thread is None or self._in_thread():
            return
        try:
            if runs_tasks():
                with slot_lent():
                    self._thread.join()
            else:
                self._thread.join()
        except BaseException:
            self.cancel_all()
            raise

    def _ensure_running(self) -> None:
        """Start the thread if necessary; the caller holds the lock."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self._stopped:
            raise RuntimeError("the pool was shut down: create another shoal.Pool")
        if self._thread is None:
            started = threading.Event()
            self._thread = threading.Thread(
                target=self._run_thread, args=(started,), name="shoal-pool", daemon=True
            )
            self._thread.start()
            started.wait()

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run_in_loop(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        if not self._wakeup_pending:
            self._wakeup_pending = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._wakeup_pending = False  # first: a later call wakes the loop again
        while self._actions:
            self._actions.popleft()()

    def _run_thread(self, started: threading.Event) -> None:
        # A pool without shutdown() finishes its calls at exit.
        atexit.register(self._finish_at_exit)
        try:
            with (
                suppress(asyncio.CancelledError),  # see ``leave``
                asyncio.Runner(loop_factory=fast_loop_factory()) as runner,
            ):
                runner.run(self._serve(started))
        finally:
            atexit.unregister(self._finish_at_exit)
            self._fail_open_calls()

    def _finish_at_exit(self) -> None:
        self.stop()
        if hasattr(sys, "last_value"):  # an error or Ctrl-C ended the program
            self.cancel_all()
        try:
            self.finish()
        except BaseException:  # such as another Ctrl-C
            self.leave()
            raise

    def _fail_open_calls(self) -> None:
        """Fail the open calls; there are some only after a bug."""
        with self._condition:
            self._stopped = True
            futures = [*self._open.values()]
        for future in futures:
            future.on_ended(None, ConnectionLost("the pool failed: create another"))

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.current_task()
        assert serving is not None, "this is a task"
        self._serving = serving
        async with open_session(self._address) as self._session:
            self._channel = CallChannel(self._session, self._address)
            started.set()
            await self._channel.run()
