"""The share of a machine's speed that its owner lends."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import Unavailable
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import CallResult, Completed, Event, RunJob
from shoal.domain.work import Call, CallStream, JobKind
from shoal.domain.worker import Offer
from shoal.tasks.function_caller import CallStreamSlot, FetchBlob, OnProgress
from shoal.transports.clock import LoopClock
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend, RunningCalls
from shoal.worker.jobs import EngineSlots
from shoal.worker.owner_throttle import (
    RULES_INTERVAL,
    WATCH_INTERVAL,
    OwnerPause,
    OwnerReadings,
    OwnerRules,
    OwnerThrottle,
)
from simulation.virtual import in_virtual_time


@pytest.mark.parametrize(
    ("percent", "slots", "lent"),
    [
        (100, 4, 4),
        (50, 4, 2),
        (50, 3, 2),
        (1, 64, 1),
        (99, 100, 99),
        (29, 100, 29),
        (0, 4, 4),
        (50, 1, 1),
    ],
)
def test_a_part_of_the_slots_is_lent(percent: int, slots: int, lent: int) -> None:
    throttle = OwnerThrottle(percent)

    assert throttle.lent(slots) == lent
    offer = Offer(frozenset({JobKind.CHAT}), slots=slots)
    assert [each.slots for each in throttle.limit((offer, offer))] == [lent, lent]


def test_a_pause_changes_no_offer() -> None:
    throttle = OwnerThrottle()

    lent = []
    for percent in (50, 0, 50, 0, 100):
        throttle.set(percent)
        lent.append(throttle.lent(4))

    assert lent == [2, 2, 2, 2, 4]


@in_virtual_time
async def test_slots_follow_the_throttle_while_jobs_run() -> None:
    throttle = OwnerThrottle(50)
    slots = EngineSlots(4, throttle)
    began: list[str] = []
    end = {name: asyncio.Event() for name in "abcdef"}

    async def run(name: str) -> None:
        async with slots:
            began.append(name)
            await end[name].wait()

    async with asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(run(name)) for name in "abcdef"}
        await asyncio.sleep(1.0)
        assert began == ["a", "b"]

        throttle.set(75)
        await asyncio.sleep(1.0)
        assert began == ["a", "b", "c"]

        throttle.set(25)
        end["a"].set()
        end["b"].set()
        running["d"].cancel()
        await asyncio.sleep(1.0)
        assert began == ["a", "b", "c"], "c has the only slot"

        end["c"].set()
        await asyncio.sleep(1.0)
        assert began == ["a", "b", "c", "e"]
        end["e"].set()
        end["f"].set()

    async with slots:
        pass  # no slot was lost


def test_slots_that_are_gone_are_forgotten() -> None:
    throttle = OwnerThrottle(50)
    seen = [weakref.ref(EngineSlots(4, throttle)) for _ in range(3)]
    slots = EngineSlots(4, throttle)
    gc.collect()

    throttle.set(25)

    assert [each() for each in seen] == [None] * 3
    assert slots.size == 1


@in_virtual_time
async def test_a_job_cancelled_as_it_gets_its_slot_gives_it_back() -> None:
    slots = EngineSlots(1)

    async def take() -> None:
        async with slots:
            pass

    async with slots:
        waiting = asyncio.create_task(take())
        await asyncio.sleep(1.0)
    waiting.cancel()  # after the grant, before the task runs
    await asyncio.gather(waiting, return_exceptions=True)

    async with asyncio.timeout(1.0):
        await take()


@in_virtual_time
async def test_cancelled_jobs_do_not_pile_up_behind_a_long_one() -> None:
    slots = EngineSlots(1)

    async def take() -> None:
        async with slots:
            pass

    async with slots:
        for _ in range(10):
            waiting = asyncio.create_task(take())
            await asyncio.sleep(1.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

        assert not slots._waiting


class HeldCalls:
    """A ``FunctionCaller`` that starts any number of calls, and ends all at once."""

    slots = 2
    on_lent: Callable[[int], None] | None = None
    names = frozenset[str]()
    trusts_code = True

    def __init__(self) -> None:
        self.began: list[str] = []
        self.end = asyncio.Event()

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        self.began.append(call.name)
        await self.end.wait()
        return b"\xc0"

    async def start(self) -> None:
        pass

    def open_stream(
        self,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> CallStreamSlot:
        raise Unavailable("no streams")

    async def close(self) -> None:
        pass


@in_virtual_time
async def test_calls_that_are_sent_alone_share_the_lent_slots() -> None:
    throttle, caller, sent = OwnerThrottle(50), HeldCalls(), list[Event]()
    slots = EngineSlots(2, throttle)

    async def send(event: Event) -> None:
        sent.append(event)

    blobs = BlobCache()
    async with asyncio.TaskGroup() as tasks:
        calls = RunningCalls(
            FunctionBackend(caller, blobs, slots),
            lambda event: True,
            send,
            lambda: None,
            tasks,
            LoopClock(),
        )
        for name in ("outer", "b", "c", "d"):
            calls.start(RunJob(JobId(name), LeaseNumber(1), Call(name, b"", b"")))
        await asyncio.sleep(1.0)
        assert caller.began == ["outer"]

        calls.update_lent_slots(1)  # it waits for a call of its own
        await asyncio.sleep(1.0)
        assert caller.began == ["outer", "b"]

        throttle.set(100)
        await asyncio.sleep(1.0)
        assert caller.began == ["outer", "b", "c"]
        calls.update_lent_slots(0)
        caller.end.set()
    await blobs.close()
    assert [type(each) for each in sent] == 4 * [Completed]


@in_virtual_time
async def test_the_owners_file_is_followed(tmp_path: Path) -> None:
    file, throttle = ThrottleFile(tmp_path), OwnerThrottle(50)
    heard: list[int] = []
    reported: list[int] = []

    with throttle.observed(lambda: heard.append(throttle.percent)):
        watching = asyncio.create_task(
            throttle.watch(
                file,
                OwnerPause(OwnerRules()),
                lambda: reported.append(throttle.percent),
            )
        )
        for percent in (0, 50, 50):
            ThrottleFile(tmp_path).write(percent)
            await asyncio.sleep(2 * WATCH_INTERVAL)
        watching.cancel()

    assert heard == reported == [0, 50]


@in_virtual_time
async def test_owners_rules_pause_and_their_orders_resume(tmp_path: Path) -> None:
    file, throttle = ThrottleFile(tmp_path), OwnerThrottle(50)
    pause = OwnerPause(OwnerRules(active_within=60.0))
    idle = 0.0
    reported: list[str] = []

    async def read() -> OwnerReadings:
        return OwnerReadings(datetime(2026, 1, 5), idle)

    def report() -> None:
        reported.append(throttle.why_paused or f"{throttle.percent}%")

    now = asyncio.get_running_loop().time
    following = [
        asyncio.create_task(throttle.follow_rules(pause, read, now, report)),
        asyncio.create_task(throttle.watch(file, pause, report)),
    ]
    await asyncio.sleep(2 * RULES_INTERVAL)
    assert reported == ["paused: its user is active"]  # once

    ThrottleFile(tmp_path).write(0)
    await asyncio.sleep(2 * WATCH_INTERVAL)
    assert throttle.why_paused == "paused by its owner"
    ThrottleFile(tmp_path).write(50)
    await asyncio.sleep(2 * RULES_INTERVAL)
    assert not throttle.paused, "its owner says so, at the keyboard"

    idle = 99.0
    await asyncio.sleep(2 * RULES_INTERVAL)
    idle = 0.0
    await asyncio.sleep(2 * RULES_INTERVAL)
    assert throttle.paused
    idle = 99.0
    await asyncio.sleep(2 * RULES_INTERVAL)
    assert reported[1:] == [
        *("paused by its owner", "50%"),
        *("paused: its user is active", "50%"),
    ]
    for each in following:
        each.cancel()
