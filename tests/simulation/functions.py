"""Functions that are called in virtual time, in slots and lanes but no processes."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from shoal.domain.errors import JobError, NotFound, Unavailable
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream
from shoal.tasks.function_caller import FetchBlob, OnProgress

NAME = "sim.square"
POISON = 13  # every number that this divides cannot be squared
PACE = (0.01, 1.0)  # seconds for a call, from and to
LONG_FROM = 1_000_000  # calls with such numbers take LONG times as long
LONG = 20
RAISED = "ZeroDivisionError: that one cannot be squared"


def squared(number: int) -> int | None:
    """Return what comes of a call with ``number``; None: it fails."""
    return None if number % POISON == 0 else number * number


@dataclass
class Made:
    """What was called, wherever; told by all workers of a world."""

    begun: list[int] = field(default_factory=list)
    over: set[int] = field(default_factory=set)  # kept calls whose end was told
    wrong: list[str] = field(default_factory=list)

    def begin(self, number: int) -> None:
        self.begun.append(number)
        if number in self.over:
            self.wrong.append(f"call {number} was made again after its end")


class SimCaller:
    """Calls the one function that there is, more or less quickly."""

    names = frozenset({NAME})
    trusts_code = False
    on_lent: Callable[[int], None] | None = None

    def __init__(
        self,
        slots: int,
        random: Random,
        made: Made,
        refuses: float,
        pace: tuple[float, float] = PACE,
    ) -> None:
        self.slots = slots
        self.busy = 0
        self._random = random
        self._made = made
        self.refuses = refuses  # which share of its jobs
        self._pace = random.uniform(*pace)  # seconds for a call, about

    async def start(self) -> None:
        pass

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        self._take_slot(call.name)
        try:
            return await self.work(call.args)
        finally:
            self.busy -= 1

    def open_stream(
        self,
        lane: CallStream,
        fetch: FetchBlob,
        returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> "SimLane":
        self._take_slot(lane.name)
        return SimLane(self, returned)

    async def close(self) -> None:
        pass

    async def work(self, args: bytes) -> bytes:
        (number,) = msgspec.msgpack.decode(args, type=tuple[int])
        self._made.begin(number)
        pace = self._pace * (LONG if number >= LONG_FROM else 1)
        await asyncio.sleep(pace * self._random.uniform(0.5, 1.5))
        if (value := squared(number)) is None:
            raise JobError(RAISED)
        return msgspec.msgpack.encode(value)

    def _take_slot(self, name: str) -> None:
        if name not in self.names:
            raise NotFound(f"there is no {name}")
        # A slot that is given out twice would wait for ever in a real one.
        if self.busy >= self.slots or self._random.random() < self.refuses:
            raise Unavailable("no process could be started")
        self.busy += 1


class SimLane:
    """Makes the calls that are pushed, one after the other."""

    def __init__(
        self, caller: SimCaller, returned: Callable[[list[CallResult]], None]
    ) -> None:
        self._caller = caller
        self._returned = returned
        self._queue: deque[StreamedCall] = deque()
        self._running: tuple[int, asyncio.Task[None]] | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        return not self._queue and self._running is None

    def push(self, calls: Sequence[StreamedCall]) -> None:
        assert not self._closed, "pushed into a lane that was closed"
        self._queue.extend(calls)
        self._go_on()

    def recall(self, numbers: Sequence[int]) -> None:
        self._queue = deque(each for each in self._queue if each.number not in numbers)
        if self._running is not None and self._running[0] in numbers:
            self._stop()
            self._go_on()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._stop()
            self._caller.busy -= 1

    def _stop(self) -> None:
        if self._running is not None:
            self._running[1].cancel()
            self._running = None

    def _go_on(self) -> None:
        if self._running is None and self._queue:
            call = self._queue.popleft()
            self._running = call.number, asyncio.create_task(self._make(call))

    async def _make(self, call: StreamedCall) -> None:
        try:
            value, error = await self._caller.work(call.args), ""
        except JobError as raised:
            value, error = b"", str(raised)
        self._running = None
        self._returned([CallResult(call.number, value, error)])
        if not self._closed:
            self._go_on()
