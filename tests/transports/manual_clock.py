"""A clock, and the CPU time of a thread, that only a test moves."""

import asyncio
from collections.abc import Callable


class ManualClock:
    """A clock, and the CPU time of the loop's thread."""

    def __init__(self, time: float = 100.0) -> None:
        self.time = time
        self.used = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def cpu(self) -> float:
        return self.used

    def call_at(self, when: float, call: Callable[[], None]) -> "ManualTimer":
        entry = (when, call)
        self.calls.append(entry)

        def cancel() -> None:
            if entry in self.calls:  # it has not run yet
                self.calls.remove(entry)

        return ManualTimer(cancel)

    def move(self, seconds: float) -> None:
        """Let time pass, and run the calls that are due by then, at the end of it."""
        self.time += seconds
        due = [each for each in self.calls if each[0] <= self.time]
        for each in due:
            if each in self.calls:  # no other has cancelled it
                self.calls.remove(each)
                each[1]()

    async def advance(self, seconds: float) -> None:
        """Let time pass, and everybody run who is due."""
        end = self.time + seconds
        await settle()
        while due := [each for each in self.calls if each[0] <= end]:
            first = min(due, key=lambda each: each[0])
            self.calls.remove(first)
            self.time = max(self.time, first[0])
            first[1]()
            await settle()
        self.time = max(self.time, end)


class ManualTimer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
