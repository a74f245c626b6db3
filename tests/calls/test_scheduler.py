"""Calls in memory, in virtual time: scheduling, failures and limits."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence

import pytest

from calls.function_workers import ACCEPTED, FunctionWorker, pack, unpack
from coordinator.hubs import Coordinator, run_pending, run_script, running_coordinator
from shoal.calls.group import IDLE_MAX, SLOT_TURN, CallRoute
from shoal.calls.scheduler import CHECK_INTERVAL, CallScheduler
from shoal.domain.errors import (
    Cancelled,
    NoFirstOutput,
    ShoalError,
    UnknownTask,
    WorkerLost,
)
from shoal.domain.ids import WorkerId
from shoal.domain.job import Priority
from shoal.domain.vocabulary import (
    CallResult,
    CancelCalls,
    CancelJob,
    Draining,
    Event,
    LoadChanged,
    PushCalls,
    Rejected,
    StreamedCall,
)
from shoal.domain.work import CallStream, JobKind
from shoal.domain.worker import Suspension, WorkerLoad
from shoal.pool.functions import CALL_GRACE_SECONDS
from shoal.pool.inputs import WorkerSuspension
from shoal.store.port import JobFilter
from shoal.transports.clock import LoopClock
from simulation.virtual import in_virtual_time

FUNCTIONS: dict[str, Callable[..., object]] = {"add": lambda a, b: a + b}
ROUTE = CallRoute(CallStream("add"), Priority.NORMAL, 60.0)


class RecordedCalls:
    """Records the reports about calls."""

    def __init__(self) -> None:
        self.values: dict[int, object] = {}
        self.errors: dict[int, ShoalError | str] = {}

    def on_pushed(self, numbers: Sequence[int], worker_id: WorkerId) -> None:
        pass

    def on_requeued(self, numbers: Sequence[int], reason: str, *, lost: bool) -> None:
        pass

    def on_results(self, returns: Iterable[CallResult]) -> None:
        for each in returns:
            assert each.number not in self.values, "it returned twice"
            if each.error:
                self.errors[each.number] = each.error
            else:
                self.values[each.number] = unpack(each.value)

    def on_failure(self, number: int, error: ShoalError) -> None:
        self.errors[number] = error


Script = Callable[[Coordinator, CallScheduler, RecordedCalls], Awaitable[None]]


def run_scheduler(script: Script, owner: str = "me") -> None:
    async def scenario(coordinator: Coordinator) -> None:
        caller = RecordedCalls()
        clock = LoopClock(asyncio.get_running_loop().time)
        scheduler = CallScheduler(coordinator.hub, clock, owner, caller)
        await script(coordinator, scheduler, caller)
        scheduler.close()

    run_script(scenario)


async def submit(
    scheduler: CallScheduler, *numbers: int, route: CallRoute = ROUTE
) -> None:
    for number in numbers:
        scheduler.submit(route, StreamedCall(number, pack((number, 1)), pack({})))
    scheduler.flush()
    await run_pending()


async def worker(
    coordinator: Coordinator,
    name: str = "w",
    slots: int = 1,
    *,
    holds: bool = False,
    accepts: frozenset[type] = ACCEPTED,
) -> FunctionWorker:
    joined = FunctionWorker(
        coordinator.hub, FUNCTIONS, name, slots, holds=holds, accepts=accepts
    )
    await run_pending()
    return joined


def test_calls_pass_through_one_call_stream() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator)

        await submit(scheduler, *range(100))

        assert caller.values == {number: number + 1 for number in range(100)}
        assert len(one.streams) == 1
        assert scheduler.pending == {}

    run_scheduler(script)


def test_call_stream_is_neither_stored_nor_receipted() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await worker(coordinator)

        await submit(scheduler, 1)
        await asyncio.sleep(IDLE_MAX + 1)

        assert (await coordinator.store.recent(JobFilter(), 1)).jobs == []
        assert await coordinator.store.ledger.head() is None

    run_scheduler(script)


def test_idle_call_stream_frees_its_slot() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator)
        await submit(scheduler, 1)
        assert len(coordinator.hub.pool.jobs) == 1

        await asyncio.sleep(IDLE_MAX + 1)

        assert coordinator.hub.pool.jobs == {}
        assert (
            coordinator.hub.pool.workers[
                next(iter(coordinator.hub.pool.workers))
            ].leases
            == {}
        )
        assert one.streams == {}

    run_scheduler(script)


async def suspend(coordinator: Coordinator, name: str, how: Suspension) -> None:
    await coordinator.hub.process(WorkerSuspension(f"wire:{name}", how, "al"))
    await asyncio.sleep(2 * CHECK_INTERVAL)


def test_paused_worker_ends_its_call_and_gets_no_more() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1, 2, 3)

        await suspend(coordinator, "one", Suspension.PAUSED)
        await worker(coordinator, "other")
        await run_pending()

        assert caller.values == {2: 3, 3: 4}
        assert len(one.streams) == 1
        one.return_all(2)
        await run_pending()
        assert caller.values[1] == 2
        assert one.streams == {}

    run_scheduler(script)


@pytest.mark.parametrize(
    "event", [Draining("leaving"), LoadChanged(WorkerLoad(unfit="is too hot"))]
)
def test_worker_that_takes_nothing_new_gets_no_more_calls(event: Event) -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1, 2)

        one.port.on_event(event)
        await worker(coordinator, "other")
        await asyncio.sleep(2 * CHECK_INTERVAL)
        one.return_all(2)
        await run_pending()

        assert caller.values == {1: 2, 2: 3}
        assert one.streams == {}

    run_scheduler(script)


@pytest.mark.parametrize("cancels", [True, False])
def test_call_of_removed_workers_moves_without_blame(cancels: bool) -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        accepts = ACCEPTED if cancels else ACCEPTED - {CancelJob, CancelCalls}
        await worker(coordinator, "one", holds=True, accepts=accepts)
        await submit(scheduler, 1, 2, 3)

        for name, following in itertools.pairwise(("one", "two", "three", "four")):
            await worker(
                coordinator, following, holds=following != "four", accepts=accepts
            )
            await suspend(coordinator, name, Suspension.REMOVED)
        await asyncio.sleep(2 * SLOT_TURN)

        assert caller.values == {1: 2, 2: 3, 3: 4}
        assert caller.errors == {}

    run_scheduler(script)


def test_call_cancelled_while_its_stream_waits_leaves_no_stream() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1)
        await suspend(coordinator, "one", Suspension.REMOVED)

        assert scheduler.cancel(1)
        await asyncio.sleep(IDLE_MAX + 1)

        assert coordinator.hub.pool.jobs == {}

    run_scheduler(script)


def test_call_streams_open_up_to_the_slots_while_calls_wait() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", 2, holds=True)
        other = await worker(coordinator, "other", 1, holds=True)

        await submit(scheduler, *range(10))

        assert len(one.streams) + len(other.streams) == 3
        assert len(one.calls) + len(other.calls) == 3

    run_scheduler(script)


def test_long_calls_go_one_at_a_time_to_free_streams() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        other = await worker(coordinator, "other", holds=True)
        await submit(scheduler, 1, 2, 3, 4)
        assert len(one.calls) == len(other.calls) == 1

        await asyncio.sleep(1)
        one.return_calls(one.calls[0][2].number)
        await run_pending()

        assert len(one.calls) == 2
        assert len(other.calls) == 1

    run_scheduler(script)


def test_calls_behind_a_long_call_are_moved() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one")
        await submit(scheduler, *range(50))  # all short, so that many are prefetched
        one.holds = True

        await submit(scheduler, *range(100, 110))
        other = await worker(coordinator, "other")
        await asyncio.sleep(1)

        recalled = one.received(CancelCalls)
        assert recalled
        assert other.streams
        assert len(caller.values) == 59
        assert [*scheduler.pending] == [one.calls[0][2].number]

    run_scheduler(script)


def test_calls_of_a_lost_stream_are_moved() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1, 2)

        one.drop()
        await worker(coordinator, "other")
        await asyncio.sleep(1)

        assert caller.values == {1: 2, 2: 3}

    run_scheduler(script)


def test_a_call_that_ended_two_connections_is_not_given_to_a_third() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await submit(scheduler, 1, 2)
        for name in ("a", "b"):
            (await worker(coordinator, name, holds=True)).drop()
            await run_pending()
        await worker(coordinator, "c")
        await asyncio.sleep(1)

        error = caller.errors[1]
        assert isinstance(error, WorkerLost)
        assert "2 workers" in str(error)
        assert "connection lost" in str(error)
        assert caller.values == {2: 3}

    run_scheduler(script)


def test_a_call_that_lost_a_worker_takes_no_other_call_with_it() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        no_stop = ACCEPTED - {CancelJob, CancelCalls}
        one = await worker(coordinator, "one", accepts=no_stop)
        await submit(scheduler, *range(50))  # all short, so that many are prefetched
        one.holds = True
        await submit(scheduler, *range(100, 104))
        assert len(one.calls) == 4
        one.drop()
        await run_pending()

        other = await worker(coordinator, "other", accepts=no_stop, holds=True)
        while other.calls:
            assert len(other.calls) == 1
            number = other.calls[0][2].number
            if number == 100:
                other.drop()
                other = await worker(coordinator, "third", accepts=no_stop, holds=True)
            else:
                other.return_all(number)
            await run_pending()

        assert isinstance(caller.errors[100], WorkerLost)
        assert {*range(101, 104)} <= caller.values.keys()

    run_scheduler(script)


def test_rejected_call_stream_moves_with_its_calls() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1)
        await worker(coordinator, "other")

        (lane,) = one.streams
        one.port.on_event(Rejected(*lane, "no slot is free"))
        await asyncio.sleep(1)

        assert caller.values == {1: 2}

    run_scheduler(script)


def test_results_of_an_ended_call_stream_are_dropped() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await submit(scheduler, 1)
        (lane,) = one.streams
        other = await worker(coordinator, "other", holds=True)
        one.port.on_event(Rejected(*lane, "no slot is free"))
        await run_pending()

        one.return_calls(1)
        await run_pending()

        assert caller.values == {}
        assert len(other.calls) == 1

    run_scheduler(script)


def test_cancelled_call_never_returns() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        await submit(scheduler, 1, 2)

        assert scheduler.cancel(1)
        assert scheduler.cancel(2)
        assert not scheduler.cancel(3)
        await run_pending()
        one.return_calls(1)
        await run_pending()

        assert one.received(CancelCalls)[0].numbers == (1,)
        assert (caller.values, caller.errors) == ({}, {})

    run_scheduler(script)


def test_worker_without_cancellation_keeps_its_slot_until_it_returns() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await submit(scheduler, 1)
        scheduler.close()
        await run_pending()
        assert len(coordinator.hub.pool.jobs) == 1

        one.accepts = ACCEPTED  # because every wire with call streams can end one
        one.return_calls(1)
        await run_pending()

        assert coordinator.hub.pool.jobs == {}
        assert caller.values == {}

    run_scheduler(script)


TIMED = CallRoute(CallStream("add", timeout=5.0), Priority.NORMAL, 60.0)
PATIENCE = 5.0 + CALL_GRACE_SECONDS  # seconds


def test_stuck_call_times_out_and_later_calls_continue() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await submit(scheduler, 1, route=TIMED)
        await submit(scheduler, 2, route=TIMED)
        await asyncio.sleep(PATIENCE - 0.5)
        assert caller.errors == {}
        await worker(coordinator, name="two")

        await asyncio.sleep(1.0)

        assert isinstance(caller.errors.pop(1), NoFirstOutput)
        assert (caller.values, caller.errors) == ({2: 3}, {})

    run_scheduler(script)


def test_call_without_a_time_limit_may_run_long() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        await submit(scheduler, 1)
        await asyncio.sleep(10 * PATIENCE)

        one.return_calls(1)
        await run_pending()

        assert 1 in caller.values

    run_scheduler(script)


def test_abandoned_calls_are_not_awaited_forever() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await submit(scheduler, 1, route=TIMED)
        scheduler.close()
        await asyncio.sleep(PATIENCE - 0.5)
        assert len(coordinator.hub.pool.jobs) == 1
        one.accepts = ACCEPTED  # because every wire with call streams can end one

        await asyncio.sleep(1.0)

        assert coordinator.hub.pool.jobs == {}

    run_scheduler(script)


def test_calls_of_disconnected_clients_are_not_repeated() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await submit(scheduler, 1)
        scheduler.close()
        two = await worker(coordinator, name="two")

        one.drop()
        await run_pending()

        assert two.commands == []
        assert coordinator.hub.pool.jobs == {}

    run_scheduler(script)


def test_call_stream_yields_its_slot_after_its_turn() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, holds=True)
        await submit(scheduler, 1, 2, 3)
        other = RecordedCalls()
        clock = LoopClock(asyncio.get_running_loop().time)
        another = CallScheduler(coordinator.hub, clock, "another", other)
        another.submit(ROUTE, StreamedCall(9, pack((9, 1)), pack({})))
        another.flush()
        await asyncio.sleep(SLOT_TURN + 0.2)
        assert len(one.streams) == 1

        one.return_calls(1)
        await run_pending()
        ((job_id, _),) = one.streams

        assert coordinator.hub.pool.jobs[job_id].job.owner == "another"
        another.close()

    run_scheduler(script)


def test_unknown_function_fails_at_once() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await worker(coordinator)

        await submit(
            scheduler, 1, route=CallRoute(CallStream("ad"), Priority.NORMAL, 60.0)
        )

        assert isinstance(caller.errors[1], UnknownTask)

    run_scheduler(script)


def test_calls_that_find_no_worker_in_time_fail_with_the_reason() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await submit(scheduler, 1)
        await asyncio.sleep(61)

        assert "no worker is connected" in str(caller.errors[1])

    run_scheduler(script)


def test_calls_of_a_revoked_owner_fail() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        await worker(coordinator, holds=True)
        await submit(scheduler, 1)

        coordinator.hub.cancel_all_of("me", "the key was revoked")
        await run_pending()

        assert isinstance(caller.errors[1], Cancelled)

    run_scheduler(script)


def test_one_message_of_calls_is_one_push() -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator)
        await submit(scheduler, *range(100))  # which shows that they are short
        before = len(one.received(PushCalls))

        await submit(scheduler, *range(200, 220))

        assert len(one.received(PushCalls)) == before + 1

    run_scheduler(script)


@pytest.mark.parametrize("slots", [1, 3])
def test_call_streams_never_exceed_the_slots_of_a_worker(slots: int) -> None:
    async def script(
        coordinator: Coordinator, scheduler: CallScheduler, caller: RecordedCalls
    ) -> None:
        one = await worker(coordinator, slots=slots, holds=True)

        await submit(scheduler, *range(20))

        assert len(one.streams) == slots
        kinds = {job.kind for job in coordinator.hub.pool.jobs.values()}
        assert kinds == {JobKind.CALL_STREAM}

    run_scheduler(script)


@in_virtual_time
async def test_routes_wait_for_room_before_opening_a_call_stream() -> None:
    async with running_coordinator(queue_max=1) as coordinator:
        caller = RecordedCalls()
        clock = LoopClock(asyncio.get_running_loop().time)
        scheduler = CallScheduler(coordinator.hub, clock, "me", caller)
        one = await worker(coordinator, holds=True)
        ways = [
            CallRoute(CallStream("add", float(n)), Priority.NORMAL, 60.0)
            for n in range(9)
        ]
        for number, route in enumerate(ways, 1):
            await submit(scheduler, number, route=route)

        asked = int(coordinator.hub.new_id().removeprefix("job")) - 1
        assert len(one.streams) == 1
        assert asked == 2, "one has the slot, and one a place"
        scheduler.close()
