"""Links in memory, and scripted sessions."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.domain.vocabulary import CancelJob, Dismiss, RunJob
from shoal.protocols.seam.session import Batch, Data, Output, Send
from shoal.transports.link import LinkClosed


class MemoryLink:
    """One end of a connection; the test is the other end."""

    peer = "test"

    def __init__(self) -> None:
        self.sent: list[Data] = []
        self.closed: list[tuple[int, str]] = []
        self.endless: Data | None = None  # received again and again
        self.writable = asyncio.Event()  # cleared: the peer does not read
        self.writable.set()
        self._incoming: deque[Data] = deque()
        self._broken: Exception | None = None
        self._wake = asyncio.Event()

    async def receive(self) -> Batch:
        if self.endless is not None:
            return [self.endless]
        while not self._incoming:
            if self._broken is not None:
                raise self._broken
            self._wake.clear()
            await self._wake.wait()
        batch = list(self._incoming)
        self._incoming.clear()
        return batch

    async def send(self, data: Data) -> None:
        await self.writable.wait()
        if self._broken is not None:
            raise self._broken
        self.sent.append(data)

    async def close(self, code: int, text: str) -> None:
        self.closed.append((code, text))

    def deliver(self, *data: Data) -> None:
        """Deliver data from the peer."""
        self._incoming.extend(data)
        self._wake.set()

    def cut(self, error: Exception | None = None) -> None:
        """Break the connection after all delivered data is read."""
        self._broken = error or LinkClosed("connection reset")
        self._wake.set()


Answer = Callable[[Data], Sequence[Any]]


def silent(data: Data) -> Sequence[Any]:
    return ()


@dataclass
class ScriptedSession:
    """Answers each message by ``answer``, and sends texts and bytes unchanged."""

    answer: Answer = silent
    opening: Sequence[Any] = ()
    deadline: float | None = None
    accepts: frozenset[type] = frozenset({RunJob, CancelJob, Dismiss})
    ticks: list[float] = field(default_factory=list)
    tick_interval: float | None = None  # seconds from one tick to the next

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        return [output for data in batch for output in self.answer(data)]

    def send(self, message: object, now: float) -> Sequence[Output]:
        return (Send(message),) if isinstance(message, (str, bytes)) else ()

    def tick(self, now: float) -> Sequence[Any]:
        self.ticks.append(now)
        if self.tick_interval is not None:
            self.deadline = now + self.tick_interval
        elif self.deadline is not None and self.deadline <= now:
            self.deadline = None
        return self.opening if len(self.ticks) == 1 else ()
