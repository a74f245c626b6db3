"""Shares the room for lines among the batches of one key and one model."""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

LineQueue: TypeAlias = tuple[str, str]
"""The owner and the model of lines."""


@dataclass(slots=True)
class LineRoom:
    """The lines of all batches that run, and the batches that wait to begin more.

    No line begins when they are ``stopped``.
    """

    stopped: bool = False
    _running: Counter[LineQueue] = field(default_factory=Counter)
    # Batches with lines that could begin, and what wakes them.
    _waiting: dict[LineQueue, dict[str, asyncio.Event]] = field(default_factory=dict)

    def share(self, queue: LineQueue, total: int, batch_id: str, running: int) -> int:
        """Return how many lines a batch may begin, of which some are ``running``.

        ``total`` is how many lines of the queue may run at once.
        """
        if self.stopped:
            return 0
        sharing = len(self._waiting.get(queue, {}).keys() | {batch_id})
        fair = math.ceil(total / sharing) - running
        return min(total - self._running[queue], fair)

    def begin(self, queue: LineQueue, lines: int) -> None:
        """Note that lines have begun."""
        self._running[queue] += lines

    def end(self, queue: LineQueue) -> None:
        """Note that a line has ended, and wake the batches that wait for its room."""
        self._running[queue] -= 1
        if not self._running[queue]:
            del self._running[queue]
        for wake in self._waiting.get(queue, {}).values():
            wake.set()

    def wait(self, queue: LineQueue, batch_id: str, wake: asyncio.Event) -> None:
        """Note that a batch has lines that could begin."""
        self._waiting.setdefault(queue, {})[batch_id] = wake

    def leave(self, queue: LineQueue, batch_id: str) -> None:
        """Note that a batch has no line that could begin."""
        others = self._waiting.get(queue, {})
        others.pop(batch_id, None)
        if not others:
            self._waiting.pop(queue, None)
