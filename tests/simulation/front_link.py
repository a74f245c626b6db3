"""The link between a front and the coordinator of a simulation, in memory."""

import asyncio
from collections.abc import Callable
from contextvars import Context

from shoal.front.channel import Channel

LATENCY = 0.001  # seconds


class LinkEnd(asyncio.Transport):
    """One end: what it writes arrives at the other, in that one's process."""

    def __init__(self, protocol: Channel, process: Context) -> None:
        super().__init__()
        self._protocol = protocol
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._other: LinkEnd
        self._open = True
        self._under_way: list[bytes] = []

    def join(self, other: "LinkEnd") -> None:
        self._other = other
        self._protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._open:
            other = self._other
            # Timers of the same moment fire in any order, so they carry no data.
            other._under_way.append(bytes(data))
            self._loop.call_later(LATENCY, other._arrive, context=other._process)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Cut the connection: each end notices it."""
        for end in (self, self._other):
            if end._open:
                end._open = False
                self._loop.call_soon(end._lose, context=end._process)

    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None:
        pass

    def _arrive(self) -> None:
        data = self._under_way.pop(0)
        if self._open:
            self._protocol.data_received(data)

    def _lose(self) -> None:
        self._protocol.connection_lost(None)


def connect(
    front: Channel, hub: Callable[[], Channel], front_process: Context, process: Context
) -> LinkEnd:
    """Connect a front to a hub; return the front's end."""
    end, other = LinkEnd(front, front_process), LinkEnd(hub(), process)
    end.join(other)
    process.run(other.join, end)
    return end
