"""The backlog: how many jobs enter the queue, which, and when."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from calls.function_workers import FunctionWorker, call
from coordinator.hubs import Coordinator, run_pending, running_coordinator
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.backlog import Backlog, QueueReservation
from shoal.coordinator.connections import WorkerConnection
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms
from shoal.domain.vocabulary import CallResult
from shoal.pool.functions import call_limits
from shoal.pool.inputs import BudgetSet
from simulation import virtual
from simulation.virtual import scripted

QUEUE_MAX = 2
OWNER = "me"


class IgnoredReports:
    """Ignores all reports about a job."""

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

    def runs(self, number: int) -> bool:
        return False


class BacklogRun:
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
        self.hub.submit(job, IgnoredReports())

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.backlog.add(number, lambda number=number: self.submit(number))  # type: ignore[misc]  # the default binds it
        self.backlog.flush()

    async def fill(self) -> None:
        """Give the worker a call, and fill the queue."""
        self.submit(-1)
        await run_pending()
        for _ in range(QUEUE_MAX):
            self.submit(-1)
        await run_pending()
        assert self.hub.queue_room(OWNER) <= 0
        self.begun.clear()

    async def end_one(self) -> None:
        """End the running call, so that one call leaves the queue."""
        self.worker.finish()
        await run_pending()


def run_script(script: Callable[[BacklogRun], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with running_coordinator(queue_max=QUEUE_MAX) as coordinator:
            run = BacklogRun(coordinator)
            await run_pending()
            await script(run)

    virtual.run(scenario())


@scripted(run_script)
async def test_jobs_start_at_once_while_there_is_room(run: BacklogRun) -> None:
    run.add(1)

    assert run.begun == [1]


@scripted(run_script)
async def test_free_place_goes_to_the_oldest_job(run: BacklogRun) -> None:
    await run.fill()
    run.add(1, 2, 3)
    await run_pending()
    assert run.begun == []

    await run.end_one()
    assert run.begun == [1]

    await run.end_one()
    assert run.begun == [1, 2]


@scripted(run_script)
async def test_removed_job_does_not_start(run: BacklogRun) -> None:
    await run.fill()
    run.add(1, 2)

    assert run.backlog.remove(1)
    assert not run.backlog.remove(1)
    await run.end_one()

    assert run.begun == [2]


async def reserved(
    run: BacklogRun, *numbers: int
) -> list["asyncio.Task[QueueReservation]"]:
    tasks = [
        asyncio.create_task(run.backlog.reserve(number), name=str(number))
        for number in numbers
    ]
    await run_pending()
    return tasks


@scripted(run_script)
async def test_reserved_place_is_exclusive_until_released(run: BacklogRun) -> None:
    await run.fill()
    first, second = await reserved(run, 1, 2)

    await run.end_one()
    assert (first.done(), second.done()) == (True, False)
    first.result().release()
    first.result().release()
    await run_pending()
    assert second.done()


def cancel(task: "asyncio.Task[QueueReservation]") -> None:
    task.cancel()


@pytest.mark.parametrize("when", ["before", "after"])
def test_cancelled_reservation_goes_to_the_next(when: str) -> None:
    async def script(run: BacklogRun) -> None:
        await run.fill()
        first, second = await reserved(run, 1, 2)
        if when == "before":
            first.cancel()
            await run.end_one()
        else:
            # Its reservation is granted, and cancelled before it resumes.
            run.hub.on_queue_room(partial(cancel, first))
            await run.end_one()

        assert first.cancelled()
        assert second.done()

    run_script(script)


@scripted(run_script)
async def test_rejected_job_is_next_when_the_queue_changes(run: BacklogRun) -> None:
    await run.fill()
    first, second = await reserved(run, 1, 2)
    await run.end_one()

    first.result().release(refused=True)
    again = asyncio.create_task(run.backlog.reserve(1, again=True))
    await run_pending()
    assert (again.done(), second.done()) == (False, False)

    await run.end_one()
    assert (again.done(), second.done()) == (True, False)
    again.result().release()
    await run_pending()
    assert second.done()


@scripted(run_script)
async def test_unpaid_jobs_do_not_block_others(run: BacklogRun) -> None:
    await run.hub.process(BudgetSet(f"user:{OWNER}", 0, "default"))
    run.terms = JobTerms(price=1)

    run.add(*range(3 * QUEUE_MAX))
    await run_pending()

    assert run.begun == [*range(3 * QUEUE_MAX)]
