"""The progress of one batch: what to start next, and when it has ended.

Pure; the clock is passed in.  A line is begun, and then it is recorded, postponed or
given up.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.store.batches import BatchStatus


@dataclass(frozen=True, slots=True)
class StartLines:
    """Start the jobs of these lines."""

    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelLines:
    """Cancel the jobs of the lines that run, because the batch ends without them."""


@dataclass(frozen=True, slots=True)
class AwaitChange:
    """Wait for a line or for room, at most until a monotonic time.

    ``for_room``: lines wait for nothing but room in the queue.
    """

    until: float | None
    for_room: bool


@dataclass(frozen=True, slots=True)
class FinalizeBatch:
    """Write the results, and give the batch this status."""

    status: BatchStatus


BatchAction: TypeAlias = StartLines | CancelLines | AwaitChange | FinalizeBatch


class BatchProgress:
    """The lines of a batch, numbered from 1: recorded, running, postponed or left.

    ``ending`` is the status that the batch gets before all lines are recorded, because
    it was cancelled or has expired; no line is begun then.
    """

    def __init__(
        self, lines: int, recorded: Iterable[int] = (), begun: Iterable[int] = ()
    ) -> None:
        """Go on where the lines ``recorded`` have a result.

        Those ``begun`` may have a job, which is worth looking after first.
        """
        self.lines = lines
        self.ending: BatchStatus | None = None
        self._done = bytearray(lines + 1)
        for line in recorded:
            self._done[line] = 1
        self.left = lines - sum(self._done)
        self._begun = deque(sorted({*begun} - {*self.recorded}))
        self._skipped = frozenset(self._begun)
        self._next = 1
        self._running: set[int] = set()
        self._postponed: list[tuple[float, int]] = []  # a heap
        self._paused = -math.inf  # until when no line is begun

    @property
    def recorded(self) -> Iterable[int]:
        """The lines that have a result, in order."""
        return (line for line in range(1, self.lines + 1) if self._done[line])

    @property
    def unrecorded(self) -> Iterable[int]:
        """The lines without a result, in order."""
        return (line for line in range(1, self.lines + 1) if not self._done[line])

    @property
    def running(self) -> int:
        """The number of lines that were started and have not ended."""
        return len(self._running)

    def next_action(self, now: float, room: int) -> BatchAction:
        """Return what to do next; ``room`` is how many lines may be started."""
        if lines := self._next_lines(now, room):
            self._running.update(lines)
            return StartLines(lines)
        if not self.left and self.ending is not BatchStatus.CANCELLED:
            return FinalizeBatch(BatchStatus.COMPLETED)
        if self.ending is not None:
            return CancelLines() if self._running else FinalizeBatch(self.ending)
        self._skip()
        if now < self._paused:
            return AwaitChange(self._paused, for_room=False)
        due = self._postponed[0][0] if self._postponed else None
        waiting = self._next <= self.lines or (due is not None and due <= now)
        return AwaitChange(None if due is None or due <= now else due, waiting)

    def record(self, line: int) -> None:
        """Note that the result of a running line is recorded."""
        self._running.remove(line)
        self._done[line] = 1
        self.left -= 1

    def postpone(self, line: int, until: float) -> None:
        """Start a running line again at a monotonic time."""
        self._running.remove(line)
        heapq.heappush(self._postponed, (until, line))

    def pause(self, until: float) -> None:
        """Begin no line before a monotonic time."""
        self._paused = max(self._paused, until)

    def give_up(self, line: int) -> None:
        """Leave a running line without a result, because the batch ends."""
        self._running.remove(line)

    def _next_lines(self, now: float, room: int) -> tuple[int, ...]:
        """Remove and return the lines to start: those begun before need no room."""
        lines = [*self._begun]
        self._begun.clear()
        if self.ending is not None or now < self._paused:
            return tuple(lines)
        while len(lines) < room and self._postponed and self._postponed[0][0] <= now:
            lines.append(heapq.heappop(self._postponed)[1])
        while len(lines) < room:
            self._skip()
            if self._next > self.lines:
                break
            lines.append(self._next)
            self._next += 1
        return tuple(lines)

    def _skip(self) -> None:
        """Go on to the next line that was not begun before a restart."""
        while self._next <= self.lines and (
            self._done[self._next] or self._next in self._skipped
        ):
            self._next += 1
