"""Jobs that wait for a place in the queue: how many begin, which, and when."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from calls.function_workers import FunctionWorker, call
from coordinator.hubs import Coordinator, run_pending, running_coordinator
from shoal.coordinator.backlog import Backlog, QueueReservation
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.job_listener import EndedJob
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms
from shoal.domain.vocabulary import CallResult
from shoal.pool.functions import call_limits
from shoal.pool.inputs import BudgetSet
from simulation import virtual

QUEUE_MAX = 2
OWNER = "me"


class Silent:
    """Takes no note of what becomes of a job."""

    def on_accepted(self, job_id: JobId) -> None:
        pass

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        pass

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def on_results(self, results: list[CallResult]) -> None:
        pass

    def on_end(self, job: EndedJob) -> None:
        pass


class Bench:
    """A hub with a worker that holds its only call, and a backlog."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.hub = coordinator.hub
        self.worker = FunctionWorker(coordinator.hub, {"f": lambda: None}, holds=True)
        self.backlog = Backlog(coordinator.hub, OWNER)
        self.begun: list[int] = []
        self.terms = JobTerms()

    def submit(self, number: int) -> None:
        self.begun.append(number)
        work = call("f")
        job = Job(self.hub.new_id(), work, call_limits(), OWNER, terms=self.terms)
        self.hub.submit(job, Silent())

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.backlog.add(number, lambda number=number: self.submit(number))  # type: ignore[misc]  # the default binds it
        self.backlog.flush()

    async def fill(self) -> None:
        """Give the worker a call, and the queue as many as it takes."""
        self.submit(-1)
        await run_pending()
        for _ in range(QUEUE_MAX):
            self.submit(-1)
        await run_pending()
        assert self.hub.queue_room(OWNER) <= 0
        self.begun.clear()

    async def end_one(self) -> None:
        """Let the worker finish, and so take one call out of the queue."""
        self.worker.finish()
        await run_pending()


def play(script: Callable[[Bench], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with running_coordinator(queue_max=QUEUE_MAX) as coordinator:
            bench = Bench(coordinator)
            await run_pending()
            await script(bench)

    virtual.run(scenario())


def test_jobs_begin_at_once_while_there_are_places() -> None:
    async def script(bench: Bench) -> None:
        bench.add(1)

        assert bench.begun == [1]

    play(script)


def test_each_place_that_is_free_takes_the_job_that_waits_longest() -> None:
    async def script(bench: Bench) -> None:
        await bench.fill()
        bench.add(1, 2, 3)
        await run_pending()
        assert bench.begun == []

        await bench.end_one()
        assert bench.begun == [1]

        await bench.end_one()
        assert bench.begun == [1, 2]

    play(script)


def test_job_that_was_removed_does_not_begin() -> None:
    async def script(bench: Bench) -> None:
        await bench.fill()
        bench.add(1, 2)

        assert bench.backlog.remove(1)
        assert not bench.backlog.remove(1)
        await bench.end_one()

        assert bench.begun == [2]

    play(script)


async def reserved(
    bench: Bench, *numbers: int
) -> list["asyncio.Task[QueueReservation]"]:
    tasks = [
        asyncio.create_task(bench.backlog.reserve(number), name=str(number))
        for number in numbers
    ]
    await run_pending()
    return tasks


def test_place_is_reserved_for_one_until_that_is_released() -> None:
    async def script(bench: Bench) -> None:
        await bench.fill()
        first, second = await reserved(bench, 1, 2)

        await bench.end_one()
        assert (first.done(), second.done()) == (True, False)
        first.result().release()
        first.result().release()
        await run_pending()
        assert second.done()

    play(script)


def cancel(task: "asyncio.Task[QueueReservation]") -> None:
    task.cancel()


@pytest.mark.parametrize("when", ["before", "after"])
def test_reservation_of_who_left_goes_to_the_next(when: str) -> None:
    async def script(bench: Bench) -> None:
        await bench.fill()
        first, second = await reserved(bench, 1, 2)
        if when == "before":
            first.cancel()
            await bench.end_one()
        else:
            # It is given a place, and does not live to take it.
            bench.hub.on_queue_room(partial(cancel, first))
            await bench.end_one()

        assert first.cancelled()
        assert second.done()

    play(script)


def test_job_that_was_refused_is_the_next_when_the_queue_has_changed() -> None:
    async def script(bench: Bench) -> None:
        await bench.fill()
        first, second = await reserved(bench, 1, 2)
        await bench.end_one()

        first.result().release(refused=True)
        again = asyncio.create_task(bench.backlog.reserve(1, again=True))
        await run_pending()
        assert (again.done(), second.done()) == (False, False)

        await bench.end_one()
        assert (again.done(), second.done()) == (True, False)
        again.result().release()
        await run_pending()
        assert second.done()

    play(script)


def test_jobs_that_nobody_pays_for_keep_no_others_waiting() -> None:
    async def script(bench: Bench) -> None:
        await bench.hub.process(BudgetSet(f"user:{OWNER}", 0, "default"))
        bench.terms = JobTerms(price=1)

        bench.add(*range(3 * QUEUE_MAX))
        await run_pending()

        assert bench.begun == [*range(3 * QUEUE_MAX)]

    play(script)
