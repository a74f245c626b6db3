"""Sends the calls of an ``AsyncPool`` on its event loop."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from aiohttp import ClientSession

from shoal.client.call_channel import CallChannel
from shoal.client.connection import JsonRequest, open_session
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.encoding import ReadResult
from shoal.client.pending_calls import (
    CallCarrier,
    CallMemory,
    ClientCall,
    resolve_future,
)

T = TypeVar("T")

NOT_ENTERED = "the pool is not open: use it within `async with shoal.AsyncPool() as …`"


class AsyncCallFuture(asyncio.Future[Any]):
    """The future result of a call; cancelling it stops the worker."""

    def __init__(self, read: ReadResult, carrier: CallCarrier) -> None:
        super().__init__()
        self.read = read
        self.carrier = carrier
        self.call: ClientCall | None = None  # once it is submitted

    @property
    def job_id(self) -> str:
        """The id of its job; empty if there is none yet."""
        return "" if self.call is None else self.call.job_id

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        if self.call is not None and self.carrier.release(self.call):
            self.carrier.drop(self.call)
        return True

    def on_ended(self, value: bytes | None, error: Exception | None) -> None:
        resolve_future(self, value, error)

    def set_cancelled(self, reason: str) -> None:
        self.cancel(reason)


class AsyncCalls:
    """Carries calls from ``start`` to ``stop``."""

    def __init__(self, address: CoordinatorAddress) -> None:
        self._address = address
        self._memory = CallMemory()
        self._open: dict[int, AsyncCallFuture] = {}
        self._memory_freed = asyncio.Event()
        # Held by the submission that waits for memory: else each ended call would wake
        # all waiting submissions.
        self._submit_lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._channel: CallChannel | None = None
        self._session: ClientSession | None = None

    @property
    def url(self) -> str:
        """The coordinator's."""
        return self._address.url

    @property
    def channel(self) -> CallChannel:
        """Raises RuntimeError before ``start`` and after ``stop``."""
        if self._channel is None:
            raise RuntimeError(NOT_ENTERED)
        return self._channel

    async def start(self) -> None:
        """Start; the first call opens the connection."""
        async with AsyncExitStack() as opened:
            session = await opened.enter_async_context(open_session(self._address))
            group = await opened.enter_async_context(asyncio.TaskGroup())
            channel = CallChannel(session, self._address)
            group.create_task(channel.run())
            await asyncio.sleep(0)  # until it runs; a cancellation here ends it
            self._stack = opened.pop_all()
        self._session, self._channel = session, channel

    async def request(self, request: JsonRequest[T]) -> T:
        """Send a request.  Raises as ``JsonRequest.send`` does, and RuntimeError."""
        if self._session is None:
            raise RuntimeError(NOT_ENTERED)
        return await request.send(self._session, self._address)

    async def submit(self, future: AsyncCallFuture, call: ClientCall) -> None:
        """Send a call, after waiting while open calls hold too much memory."""
        async with self._submit_lock:
            while not self._memory.add(call):
                self._memory_freed.clear()
                await self._memory_freed.wait()
        channel = self.channel
        future.call = call
        self._open[call.number] = future
        channel.submit(call)

    def release(self, call: ClientCall) -> bool:
        """Count a call as ended; False if it was already."""
        if self._open.pop(call.number, None) is None:
            return False
        self._memory.remove(call)
        self._memory_freed.set()
        return True

    def drop(self, call: ClientCall) -> None:
        """Cancel a call whose result is not wanted any more."""
        if self._channel is not None:
            self._channel.drop(call)

    def replace(self, old: ClientCall, new: ClientCall) -> bool:
        """Send a call in the place of one that has ended; False if it was cancelled."""
        future = self._open.pop(old.number, None)
        if future is None:
            return False
        self._memory.remove(old)
        self._memory.add(new, force=True)
        self._open[new.number] = future
        self.channel.submit(new)
        return True

    async def stop(self, *, cancel: bool) -> None:
        """Accept no more calls, and wait for the open ones."""
        if self._channel is None:
            return
        if cancel:
            for future in [*self._open.values()]:
                future.cancel()
        self._channel.close()
        stack = self._stack.pop_all()
        try:
            await stack.aclose()
        finally:
            self._channel = self._session = None
