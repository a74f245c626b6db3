"""Load reports of workers, and their rate limit."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import pytest

from coordinator.hubs import Coordinator, ScriptedWorker, run_script
from shoal.coordinator.worker_events import (
    QUEUED_MAX,
    REPORT_INTERVAL,
    SPEED_MIN,
    UNFIT_MAX,
)
from shoal.domain.facts import Fact, WorkerLoadChanged
from shoal.domain.vocabulary import Joined, LoadChanged
from shoal.domain.worker import CHAT_ONLY, Offer, WorkerLoad

HOT = LoadChanged(WorkerLoad("is too hot"))
FIT = LoadChanged(WorkerLoad())


def with_worker(
    script: Callable[
        [Coordinator, ScriptedWorker, list[WorkerLoadChanged]], Awaitable[None]
    ],
) -> None:
    async def whole(coordinator: Coordinator) -> None:
        facts: list[WorkerLoadChanged] = []

        def saw(batch: Sequence[Fact]) -> None:
            facts.extend(each for each in batch if isinstance(each, WorkerLoadChanged))

        coordinator.hub.subscribe(saw)
        await script(coordinator, await coordinator.join(), facts)

    run_script(whole)


def condition(coordinator: Coordinator) -> WorkerLoad:
    (worker,) = coordinator.hub.pool.workers.values()
    return worker.load


def test_recovered_worker_gets_waiting_jobs() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: object
    ) -> None:
        w.emit(HOT)
        client = await coordinator.request()
        assert w.runs == []

        w.emit(FIT)
        await asyncio.sleep(REPORT_INTERVAL)

        assert len(w.runs) == 1
        w.complete()
        await asyncio.sleep(0.05)
        assert client.outcome is not None

    with_worker(script)


def test_first_change_applies_at_once_and_rapid_ones_later() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: list[WorkerLoadChanged]
    ) -> None:
        for number in range(1000):
            w.emit(HOT if number % 2 == 0 else FIT)
        await asyncio.sleep(0.05)
        assert [fact.load.unfit for fact in facts] == ["is too hot"]

        await asyncio.sleep(REPORT_INTERVAL)

        assert [fact.load.unfit for fact in facts] == ["is too hot", ""]
        assert condition(coordinator) == WorkerLoad()

    with_worker(script)


def test_unchanged_load_is_no_fact() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: list[WorkerLoadChanged]
    ) -> None:
        for _ in range(5):
            w.emit(HOT)
            await asyncio.sleep(1.0)

        assert len(facts) == 1
        assert facts[0].fitness_changed

    with_worker(script)


def test_load_is_not_stored() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: object
    ) -> None:
        coordinator.store.writable.clear()  # otherwise it would wait for the store

        w.emit(HOT)
        await asyncio.sleep(0.05)

        assert condition(coordinator).unfit
        coordinator.store.writable.set()

    with_worker(script)


def test_deferred_starts_are_stored_despite_load_changes() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: object
    ) -> None:
        client = await coordinator.request()
        w.write("hi")
        for queued in range(20):
            w.emit(LoadChanged(WorkerLoad(queued=queued)))
            await asyncio.sleep(0.05)

        names = [
            type(fact).__name__ for fact in await coordinator.history(client.job_id)
        ]
        assert names == ["JobSubmitted", "JobLeased", "JobStarted"]

    with_worker(script)


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (WorkerLoad(speed=0.0), WorkerLoad(speed=SPEED_MIN)),
        (WorkerLoad(speed=-1.0), WorkerLoad(speed=SPEED_MIN)),
        (WorkerLoad(speed=7.0, queued=1), WorkerLoad(queued=1)),
        (WorkerLoad(speed=math.nan, queued=1), WorkerLoad(queued=1)),
        (WorkerLoad(queued=-3, speed=0.5), WorkerLoad(speed=0.5)),
        (WorkerLoad(queued=1 << 70), WorkerLoad(queued=QUEUED_MAX)),
        (WorkerLoad("x" * 1000), WorkerLoad("x" * UNFIT_MAX)),
    ],
)
def test_invalid_load_is_clamped(said: WorkerLoad, taken: WorkerLoad) -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: object
    ) -> None:
        w.emit(LoadChanged(said))
        await asyncio.sleep(0.05)

        assert condition(coordinator) == taken

    with_worker(script)


def test_rejoined_worker_starts_fit() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: object
    ) -> None:
        w.emit(HOT, FIT)  # the second is still deferred
        w.emit(Joined("w", Offer(CHAT_ONLY, frozenset({"m"}))))
        w.emit(LoadChanged(WorkerLoad(queued=3)))
        await asyncio.sleep(2 * REPORT_INTERVAL)

        assert condition(coordinator) == WorkerLoad(queued=3)

    with_worker(script)


def test_disconnected_worker_reports_no_load() -> None:
    async def script(
        coordinator: Coordinator, w: ScriptedWorker, facts: list[WorkerLoadChanged]
    ) -> None:
        w.emit(HOT, FIT)
        w.port.on_disconnect("cut off")
        await asyncio.sleep(2 * REPORT_INTERVAL)

        assert coordinator.hub.pool.workers == {}
        assert len(facts) <= 1

    with_worker(script)
