"""Durable calls in virtual time: commits, failures and restarts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from calls.function_workers import ACCEPTED, RECORD, FunctionWorker, pack, unpack
from coordinator.hubs import Coordinator, SlowStore, run_pending, running_coordinator
from shoal.calls import durable
from shoal.calls.durable import LEASED_AFTER, DurableCalls
from shoal.calls.group import CallRoute
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.recovery import CLAIM_GRACE
from shoal.coordinator.store_health import RETRY_MAX
from shoal.domain.errors import (
    Cancelled,
    JobError,
    KeyReused,
    NoWorker,
    QueueFull,
    ShoalError,
    ShuttingDown,
    StoreError,
    UnknownTask,
    WorkerLost,
)
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobLeased,
    JobRequeued,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CancelCalls, CancelJob, PushCalls, Rejected
from shoal.domain.work import Call, CallStream
from shoal.pool.functions import call_limits
from shoal.pool.lifecycle import JobState
from shoal.transports.clock import LoopClock
from simulation import virtual
from simulation.virtual import in_virtual_time, scripted

QUEUE = 60.0  # seconds: the queue limit of a call
ROUTE = CallRoute(CallStream("add"), Priority.NORMAL, QUEUE)


FUNCTIONS: dict[str, Callable[..., object]] = {"add": lambda a, b: a + b}


class Reports:
    """The reports about one call."""

    def __init__(self) -> None:
        self.accepted = False
        self.leases: list[LeaseNumber] = []
        self.ends: list[Outcome | ShoalError | None] = []

    def on_accepted(self, job_id: JobId) -> None:
        self.accepted = True

    def on_started(self, job_id: JobId, lease: LeaseNumber) -> None:
        self.leases.append(lease)

    def on_end(self, job: EndedJob) -> None:
        self.ends.append(job.end)

    @property
    def value(self) -> object:
        (end,) = self.ends
        assert isinstance(end, Outcome), end
        return unpack(end.value)

    @property
    def error(self) -> ShoalError:
        (end,) = self.ends
        assert isinstance(end, ShoalError), end
        return end


class Caller:
    """Makes durable calls at a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.its = coordinator
        clock = LoopClock(asyncio.get_running_loop().time)
        self.calls = coordinator.hub.carried = DurableCalls(
            coordinator.hub, coordinator.store, clock
        )
        self.task = asyncio.create_task(self.calls.run())

    def job(
        self, *args: object, name: str = "add", key: str = "", owner: str = "me"
    ) -> Job:
        work = Call(name, pack(args), pack({}))
        return Job(
            self.its.hub.new_id(),
            work,
            call_limits(queue=QUEUE),
            owner,
            idempotency_key=key,
        )

    def submit(self, job: Job) -> Reports:
        reports = Reports()
        self.calls.submit(job, ROUTE, reports)
        self.calls.flush(job.owner)
        return reports

    async def state(self, job: Job) -> JobState | None:
        stored = await self.its.store.job(job.id)
        return None if stored is None else stored.state

    async def history(self, job: Job) -> list[type[Fact]]:
        return [type(each) for each in await self.its.history(job.id)]


Script = Callable[[Caller], Awaitable[None]]


def play(script: Script) -> None:
    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            await script(Caller(coordinator))

    virtual.run(scenario())


async def join(
    caller: Caller, name: str = "w", *, holds: bool = False
) -> FunctionWorker:
    worker = FunctionWorker(caller.its.hub, FUNCTIONS, name, holds=holds)
    await run_pending()
    return worker


@scripted(play)
async def test_a_call_returns_and_is_in_the_store(caller: Caller) -> None:
    await join(caller)
    job = caller.job(1, 2)

    reports = caller.submit(job)
    await run_pending()

    assert reports.accepted
    assert reports.value == 3
    stored = await caller.its.store.job(job.id)
    assert stored is not None
    assert stored.state is JobState.DONE
    assert stored.outcome is not None
    assert unpack(stored.outcome.value) == 3
    assert (stored.lease, stored.job) == (1, job)
    assert await caller.history(job) == [JobSubmitted, JobLeased, JobCompleted]


@scripted(play)
async def test_nothing_is_reported_before_it_is_stored(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    caller.its.store.writable.clear()
    job = caller.job(1, 2)

    reports = caller.submit(job)
    await run_pending()
    assert not reports.accepted

    caller.its.store.writable.set()
    await run_pending()
    assert reports.accepted
    caller.its.store.writable.clear()
    worker.return_all(3)
    await run_pending()
    assert reports.ends == []

    caller.its.store.writable.set()
    await run_pending()
    assert reports.value == 3


@scripted(play)
async def test_a_call_runs_while_its_acceptance_is_written(caller: Caller) -> None:
    worker = await join(caller)
    caller.submit(caller.job(1, 1))  # which opens the stream
    await run_pending()
    caller.its.store.writable.clear()

    reports = caller.submit(caller.job(2, 2))
    await run_pending()
    assert len(worker.received(PushCalls)) == 2
    assert (reports.accepted, reports.ends) == (False, [])

    caller.its.store.writable.set()
    await run_pending()
    assert reports.accepted
    assert reports.value == 4


@scripted(play)
async def test_a_burst_shares_its_commits(caller: Caller) -> None:
    await join(caller)
    caller.submit(caller.job(0, 0))
    await run_pending()
    before = caller.its.store.appends

    reports = []
    for number in range(100):
        reports.append(Reports())
        caller.calls.submit(caller.job(number, 1), ROUTE, reports[-1])
    caller.calls.flush("me")
    await run_pending()

    assert [each.value for each in reports] == list(range(1, 101))
    assert caller.its.store.appends - before < 30


@scripted(play)
async def test_an_error_of_the_function_fails_the_call(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    job = caller.job(1, 2)
    reports = caller.submit(job)
    await run_pending()

    worker.return_all(error="ValueError: zap")
    await run_pending()

    assert isinstance(reports.error, JobError)
    assert str(reports.error) == "ValueError: zap"
    assert reports.error.exception == RECORD
    assert await caller.state(job) is JobState.FAILED


@scripted(play)
async def test_a_lease_is_recorded_when_it_lasts(caller: Caller) -> None:
    await join(caller, holds=True)
    job = caller.job(1, 2)
    reports = caller.submit(job)
    assert reports.leases == []
    await asyncio.sleep(2 * LEASED_AFTER)
    await run_pending()

    assert reports.leases == [1]
    assert await caller.state(job) is JobState.LEASED


@scripted(play)
async def test_a_lost_worker_is_in_the_history_and_another_one_runs_the_call(
    caller: Caller,
) -> None:
    first = await join(caller, "first", holds=True)
    job = caller.job(1, 2)
    reports = caller.submit(job)
    await run_pending()
    await join(caller, "second")
    first.drop()
    await run_pending()

    assert reports.value == 3
    leased = [
        each
        for each in await caller.its.history(job.id)
        if isinstance(each, JobLeased | JobRequeued)
    ]
    assert [each.lease for each in leased] == [1, 1, 2]
    assert isinstance(leased[1], JobRequeued)
    assert "connection lost" in leased[1].reason


@scripted(play)
async def test_a_call_that_takes_workers_down_is_given_up(caller: Caller) -> None:
    job = caller.job(1, 2)
    reports = caller.submit(job)
    for number in range(3):
        worker = await join(caller, f"w{number}", holds=True)
        worker.drop()
        await run_pending()

    assert isinstance(reports.error, WorkerLost)
    assert await caller.state(job) is JobState.FAILED


@scripted(play)
async def test_a_call_that_finds_no_worker_in_time_expires(caller: Caller) -> None:
    job = caller.job(1, 2)
    reports = caller.submit(job)
    await asyncio.sleep(QUEUE / 2)
    later = caller.submit(caller.job(3, 4))
    await asyncio.sleep(QUEUE / 2 + 1)
    await run_pending()

    assert isinstance(reports.error, NoWorker)
    assert "no worker is connected" in str(reports.error)
    assert await caller.state(job) is JobState.EXPIRED
    assert await caller.history(job) == [JobSubmitted, JobExpired]
    assert later.ends == []  # its own limit has not expired

    await join(caller)
    await run_pending()
    assert later.value == 7


@scripted(play)
async def test_a_function_that_no_worker_has_is_refused(caller: Caller) -> None:
    await join(caller)
    job = caller.job(1, 2, name="sub")

    with pytest.raises(UnknownTask):
        caller.submit(job)
    await run_pending()

    assert await caller.state(job) is None


@pytest.mark.parametrize("running", [False, True])
def test_a_call_can_be_cancelled(running: bool) -> None:
    async def script(caller: Caller) -> None:
        worker = None
        if running:
            worker = await join(caller, holds=True)
        job = caller.job(1, 2)
        reports = caller.submit(job)
        await run_pending()

        assert caller.its.hub.cancel(job.id, "enough")
        await run_pending()

        assert isinstance(reports.error, Cancelled)
        assert await caller.state(job) is JobState.CANCELLED
        assert not caller.its.hub.cancel(job.id, "again")
        if worker is not None:
            assert worker.received(CancelCalls)
            worker.return_all(3)  # it was in progress
            await run_pending()
            assert len(reports.ends) == 1

    play(script)


@scripted(play)
async def test_a_cancelled_call_does_not_move_with_its_stream(caller: Caller) -> None:
    one = await join(caller, "one", holds=True)
    one.accepts = ACCEPTED - {CancelJob}  # it runs the call to its end
    job = caller.job(1, 2)
    reports = caller.submit(job)
    await run_pending()
    other = await join(caller, "other")
    assert caller.calls.cancel(job.id, "not wanted")
    (stream,) = one.streams

    one.port.on_event(Rejected(*stream, "no slot is free"))
    await run_pending()
    later = caller.submit(caller.job(3, 4))
    await run_pending()

    assert isinstance(reports.error, Cancelled)
    assert later.value == 7
    assert [len(each.calls) for each in other.received(PushCalls)] == [1]


@scripted(play)
async def test_a_cancellation_is_awaited_until_it_is_stored(caller: Caller) -> None:
    job = caller.job(1, 2)
    caller.submit(job)
    await run_pending()

    await caller.its.hub.cancel_now(job.id, "enough")

    assert await caller.history(job) == [JobSubmitted, JobCancelled]


@scripted(play)
async def test_all_calls_of_an_owner_can_be_cancelled(caller: Caller) -> None:
    mine = [caller.submit(caller.job(n, 1)) for n in range(3)]
    other = caller.submit(caller.job(1, 1, owner="you"))
    await run_pending()

    # The fourth is their call stream.
    assert caller.its.hub.cancel_all_of("me", "the key was revoked") == 4
    await run_pending()

    assert all(isinstance(each.error, Cancelled) for each in mine)
    assert other.ends == []


@scripted(play)
async def test_a_key_finds_the_open_call(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    job = caller.job(1, 2, key="k")
    first = caller.submit(job)
    await run_pending()

    second = Reports()
    assert caller.calls.attach(caller.job(1, 2, key="k"), second) == job.id
    assert second.accepted
    with pytest.raises(KeyReused):
        caller.calls.attach(caller.job(5, 5, key="k"), Reports())
    with pytest.raises(KeyReused):
        caller.submit(caller.job(1, 2, key="k"))
    worker.return_all(3)
    await run_pending()

    assert (first.value, second.value) == (3, 3)
    assert caller.calls.attach(caller.job(1, 2, key="k"), Reports()) is None


@scripted(play)
async def test_a_failed_call_frees_its_key(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    caller.submit(caller.job(1, 2, key="k"))
    await run_pending()
    worker.return_all(error="ValueError: zap")
    await run_pending()
    worker.holds = False

    again = caller.submit(caller.job(1, 2, key="k"))
    await run_pending()

    assert again.value == 3


@scripted(play)
async def test_a_result_can_be_awaited_from_outside(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    job = caller.job(1, 2)
    caller.submit(job)
    await run_pending()

    with caller.its.hub.observe_job(job.id) as reader:
        assert reader is not None
        worker.return_all(3)
        outcome = await reader.outcome()

    assert unpack(outcome.value) == 3
    await run_pending()
    with caller.its.hub.observe_job(job.id) as reader:
        assert reader is None


@in_virtual_time
async def test_open_calls_survive_the_coordinator() -> None:
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as coordinator:
        caller = Caller(coordinator)
        await join(caller, holds=True)
        running, waiting = caller.job(1, 2, key="k"), caller.job(3, 4)
        caller.submit(running)
        caller.submit(waiting)
        await asyncio.sleep(1)
    async with running_coordinator(store) as coordinator:
        await join(Caller(coordinator))
        await asyncio.sleep(CLAIM_GRACE)  # a worker may have had the other one
        await run_pending()

        for job, value in ((running, 3), (waiting, 7)):
            stored = await store.job(job.id)
            assert stored is not None
            assert stored.outcome is not None
            assert unpack(stored.outcome.value) == value
    await store.close()


@scripted(play)
async def test_a_stop_waits_for_calls_at_workers_and_leaves_the_others_in_the_store(
    caller: Caller,
) -> None:
    worker = await join(caller, holds=True)
    running = caller.submit(caller.job(1, 2))
    waiting_job = caller.job(3, 4)
    waiting = caller.submit(waiting_job)
    await run_pending()

    caller.calls.stop()
    stopping = asyncio.create_task(caller.its.hub.drain())
    await run_pending()
    with pytest.raises(ShuttingDown):
        caller.submit(caller.job(5, 6))
    assert not stopping.done()
    worker.return_all(3)
    await stopping
    await caller.calls.stored()

    assert running.value == 3
    assert waiting.ends == []
    assert await caller.state(waiting_job) is JobState.QUEUED


@scripted(play)
async def test_a_store_that_fails_ends_all_calls(caller: Caller) -> None:
    await join(caller, holds=True)
    first = caller.submit(caller.job(1, 2))
    await run_pending()
    caller.its.store.full = True
    second = caller.submit(caller.job(3, 4))
    await run_pending()

    assert isinstance(first.error, StoreError)
    assert isinstance(second.error, StoreError)
    with pytest.raises(StoreError):
        caller.submit(caller.job(5, 6))
    with pytest.raises(StoreError):
        await caller.calls.stored()


@scripted(play)
async def test_results_wait_for_space_on_a_full_disk(caller: Caller) -> None:
    worker = await join(caller, holds=True)
    running = caller.submit(caller.job(1, 2))
    await run_pending()
    caller.its.store.no_space = True
    unwritten = caller.submit(caller.job(3, 4))
    await run_pending()

    with pytest.raises(StoreError):
        caller.submit(caller.job(5, 6))
    worker.return_all(3)
    await asyncio.sleep(5.0)
    assert running.ends == []
    assert unwritten.ends == []
    assert not unwritten.accepted
    caller.its.store.no_space = False
    await asyncio.sleep(RETRY_MAX)
    worker.return_all(7)
    await run_pending()

    assert (running.value, unwritten.value) == (3, 7)
    assert unwritten.accepted
    assert caller.submit(caller.job(5, 6)).ends == []


@scripted(play)
async def test_no_call_is_sent_while_its_result_could_not_be_stored(
    caller: Caller,
) -> None:
    worker = await join(caller, holds=True)
    for number in range(3):
        caller.submit(caller.job(number, 1))
    await run_pending()
    caller.its.store.no_space = True
    caller.submit(caller.job(3, 1))
    await run_pending()
    pushed = len(worker.received(PushCalls))

    worker.return_all(1)
    other = await join(caller, name="other")
    await asyncio.sleep(5.0)
    assert len(worker.received(PushCalls)) == pushed
    assert other.received(PushCalls) == []
    caller.its.store.no_space = False
    await asyncio.sleep(RETRY_MAX + 1.0)

    assert worker.received(PushCalls)[pushed:] or other.received(PushCalls)


def test_the_open_calls_of_an_owner_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable, "OWNER_OPEN_MAX", 2)

    async def script(caller: Caller) -> None:
        for number in range(2):
            caller.submit(caller.job(number, 1))
        with pytest.raises(QueueFull):
            caller.submit(caller.job(2, 1))
        caller.submit(caller.job(2, 1, owner="you"))

    play(script)
