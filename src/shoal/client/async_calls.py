"""Sends the calls of an ``AsyncPool`` on its event loop."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from shoal.client.call_channel import CallChannel
from shoal.client.coordinator import CoordinatorAddress, open_session
from shoal.client.encoding import ReadResult
from shoal.client.pending_calls import (
    CallCarrier,
    CallMemory,
    ClientCall,
    resolve_future,
)

NOT_ENTERED = "the pool is not open: use it within `async with shoal.AsyncPool() as …`"


class AwaitedCall(asyncio.Future[Any]):
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

    def __init__(self, place: CoordinatorAddress) -> None:
        self._place = place
        self._held = CallMemory()
        self._open: dict[int, AwaitedCall] = {}
        self._room = asyncio.Event()
        self._turn = (
            asyncio.Lock()
        )  # held by the submission that waits for room, in order
        self._running = AsyncExitStack()
        self._channel: CallChannel | None = None

    @property
    def url(self) -> str:
        """The coordinator's."""
        return self._place.url

    @property
    def channel(self) -> CallChannel:
        """Raises RuntimeError before ``start`` and after ``stop``."""
        if self._channel is None:
            raise RuntimeError(NOT_ENTERED)
        return self._channel

    async def start(self) -> None:
        """Start; the first call opens the connection."""
        session = await self._running.enter_async_context(open_session(self._place))
        group = await self._running.enter_async_context(asyncio.TaskGroup())
        self._channel = CallChannel(session, self._place)
        group.create_task(self._channel.run())
        await asyncio.sleep(0)  # until it runs

    async def submit(self, future: AwaitedCall, asked: ClientCall) -> None:
        """Send a call, after waiting while open calls hold too much memory."""
        async with (
            self._turn
        ):  # else each ended call would wake all waiting submissions
            while not self._held.add(asked):
                self._room.clear()
                await self._room.wait()
        channel = self.channel
        future.call = asked
        self._open[asked.number] = future
        channel.submit(asked)

    def release(self, asked: ClientCall) -> bool:
        """Count a call as ended; False if it was already."""
        if self._open.pop(asked.number, None) is None:
            return False
        self._held.remove(asked)
        self._room.set()
        return True

    def drop(self, asked: ClientCall) -> None:
        """Cancel a call whose result is not wanted any more."""
        if self._channel is not None:
            self._channel.drop(asked)

    async def stop(self, *, cancel: bool) -> None:
        """Accept no more calls, and wait for the open ones."""
        if self._channel is None:
            return
        if cancel:
            for future in [*self._open.values()]:
                future.cancel()
        self._channel.close()
        ending = self._running.pop_all()
        try:
            await ending.aclose()
        finally:
            self._channel = None
