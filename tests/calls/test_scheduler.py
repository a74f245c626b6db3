"""Calls that are not stored, in virtual time: who gets which, and what is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import pytest

from calls.function_workers import ACCEPTED, FunctionWorker, pack, unpack
from coordinator.hubs import Coordinator, run_pending, run_script, running_coordinator
from shoal.calls.group import IDLE_MAX, SLOT_TURN, CallRoute
from shoal.calls.scheduler import CallScheduler
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
    PushCalls,
    Rejected,
    StreamedCall,
)
from shoal.domain.work import CallStream, JobKind
from shoal.pool.functions import CALL_GRACE_SECONDS
from shoal.store.port import JobFilter
from shoal.transports.clock import LoopClock
from simulation import virtual

FUNCTIONS: dict[str, Callable[..., object]] = {"add": lambda a, b: a + b}
WAY = CallRoute(CallStream("add"), Priority.NORMAL, 60.0)


class Caller:
    """Notes what became of the calls."""

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


Script = Callable[[Coordinator, CallScheduler, Caller], Awaitable[None]]


def on_a_board(script: Script, owner: str = "me") -> None:
    async def scenario(coordinator: Coordinator) -> None:
        caller = Caller()
        clock = LoopClock(asyncio.get_running_loop().time)
        board = CallScheduler(coordinator.hub, clock, owner, caller)
        await script(coordinator, board, caller)
        board.close()

    run_script(scenario)


async def ask(board: CallScheduler, *numbers: int, way: CallRoute = WAY) -> None:
    for number in numbers:
        board.submit(way, StreamedCall(number, pack((number, 1)), pack({})))
    board.flush()
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


def test_calls_go_through_one_lane_and_come_back() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator)

        await ask(board, *range(100))

        assert caller.values == {number: number + 1 for number in range(100)}
        assert len(one.streams) == 1
        assert board.pending == {}

    on_a_board(script)


def test_a_lane_is_neither_stored_nor_receipted() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        await worker(coordinator)

        await ask(board, 1)
        await asyncio.sleep(IDLE_MAX + 1)

        assert await coordinator.store.recent(JobFilter(), 1) == []
        assert await coordinator.store.ledger.head() is None

    on_a_board(script)


def test_an_idle_lane_gives_its_slot_back() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator)
        await ask(board, 1)
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

    on_a_board(script)


def test_more_lanes_are_opened_while_calls_wait_up_to_the_slots() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one", 2, holds=True)
        other = await worker(coordinator, "other", 1, holds=True)

        await ask(board, *range(10))

        assert len(one.streams) + len(other.streams) == 3
        assert len(one.calls) + len(other.calls) == 3

    on_a_board(script)


def test_long_calls_are_given_one_at_a_time_to_whoever_is_free() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        other = await worker(coordinator, "other", holds=True)
        await ask(board, 1, 2, 3, 4)
        assert len(one.calls) == len(other.calls) == 1

        await asyncio.sleep(1)
        one.return_calls(one.calls[0][2].number)
        await run_pending()

        assert len(one.calls) == 2
        assert len(other.calls) == 1

    on_a_board(script)


def test_calls_behind_one_that_takes_long_are_given_to_others() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one")
        await ask(board, *range(50))  # all short, so that many are given ahead
        one.holds = True

        await ask(board, *range(100, 110))
        other = await worker(coordinator, "other")
        await asyncio.sleep(1)

        recalled = one.received(CancelCalls)
        assert recalled
        assert other.streams
        assert len(caller.values) == 59
        assert [*board.pending] == [one.calls[0][2].number]

    on_a_board(script)


def test_calls_of_a_lost_lane_go_to_others() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await ask(board, 1, 2)

        one.drop()
        await worker(coordinator, "other")
        await asyncio.sleep(1)

        assert caller.values == {1: 2, 2: 3}

    on_a_board(script)


def test_a_call_that_ended_two_connections_is_not_given_to_a_third() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        await ask(board, 1, 2)
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

    on_a_board(script)


def test_a_call_that_lost_a_worker_takes_no_other_call_with_it() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        no_stop = ACCEPTED - {CancelJob, CancelCalls}
        one = await worker(coordinator, "one", accepts=no_stop)
        await ask(board, *range(50))  # all short, so that many are given ahead
        one.holds = True
        await ask(board, *range(100, 104))
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

    on_a_board(script)


def test_a_lane_that_is_refused_goes_elsewhere_with_its_calls() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await ask(board, 1)
        await worker(coordinator, "other")

        (lane,) = one.streams
        one.port.on_event(Rejected(*lane, "no slot is free"))
        await asyncio.sleep(1)

        assert caller.values == {1: 2}

    on_a_board(script)


def test_what_comes_of_a_lane_that_is_over_is_not_told() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, "one", holds=True)
        await ask(board, 1)
        (lane,) = one.streams
        other = await worker(coordinator, "other", holds=True)
        one.port.on_event(Rejected(*lane, "no slot is free"))
        await run_pending()

        one.return_calls(1)
        await run_pending()

        assert caller.values == {}
        assert len(other.calls) == 1

    on_a_board(script)


def test_a_call_that_is_taken_back_never_returns() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        await ask(board, 1, 2)

        assert board.cancel(1)
        assert board.cancel(2)
        assert not board.cancel(3)
        await run_pending()
        one.return_calls(1)
        await run_pending()

        assert one.received(CancelCalls)[0].numbers == (1,)
        assert (caller.values, caller.errors) == ({}, {})

    on_a_board(script)


def test_a_worker_that_cannot_stop_keeps_its_slot_until_it_returns() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await ask(board, 1)
        board.close()
        await run_pending()
        assert len(coordinator.hub.pool.jobs) == 1

        one.accepts = ACCEPTED  # for any wire with lanes can be told that one is over
        one.return_calls(1)
        await run_pending()

        assert coordinator.hub.pool.jobs == {}
        assert caller.values == {}

    on_a_board(script)


TIMED = CallRoute(CallStream("add", timeout=5.0), Priority.NORMAL, 60.0)
PATIENCE = 5.0 + CALL_GRACE_SECONDS  # seconds


def test_a_call_that_nothing_is_heard_of_is_given_up_and_those_behind_go_on() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await ask(board, 1, way=TIMED)
        await ask(board, 2, way=TIMED)
        await asyncio.sleep(PATIENCE - 0.5)
        assert caller.errors == {}
        await worker(coordinator, name="two")

        await asyncio.sleep(1.0)

        assert isinstance(caller.errors.pop(1), NoFirstOutput)
        assert (caller.values, caller.errors) == ({2: 3}, {})

    on_a_board(script)


def test_a_call_without_a_time_limit_may_take_long() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        await ask(board, 1)
        await asyncio.sleep(10 * PATIENCE)

        one.return_calls(1)
        await run_pending()

        assert 1 in caller.values

    on_a_board(script)


def test_what_cannot_be_stopped_is_not_waited_for_without_end_when_all_left() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await ask(board, 1, way=TIMED)
        board.close()
        await asyncio.sleep(PATIENCE - 0.5)
        assert len(coordinator.hub.pool.jobs) == 1
        one.accepts = ACCEPTED  # for any wire with lanes can be told that one is over

        await asyncio.sleep(1.0)

        assert coordinator.hub.pool.jobs == {}

    on_a_board(script)


def test_calls_of_those_who_left_are_not_made_again() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        one.accepts = ACCEPTED - {CancelJob}
        await ask(board, 1)
        board.close()
        two = await worker(coordinator, name="two")

        one.drop()
        await run_pending()

        assert two.commands == []
        assert coordinator.hub.pool.jobs == {}

    on_a_board(script)


def test_a_lane_leaves_after_its_turn_while_others_wait() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, holds=True)
        await ask(board, 1, 2, 3)
        other = Caller()
        clock = LoopClock(asyncio.get_running_loop().time)
        another = CallScheduler(coordinator.hub, clock, "another", other)
        another.submit(WAY, StreamedCall(9, pack((9, 1)), pack({})))
        another.flush()
        await asyncio.sleep(SLOT_TURN + 0.2)
        assert len(one.streams) == 1

        one.return_calls(1)
        await run_pending()
        ((job_id, _),) = one.streams

        assert coordinator.hub.pool.jobs[job_id].job.owner == "another"
        another.close()

    on_a_board(script)


def test_a_function_that_nobody_has_is_told_at_once() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        await worker(coordinator)

        await ask(board, 1, way=CallRoute(CallStream("ad"), Priority.NORMAL, 60.0))

        assert isinstance(caller.errors[1], UnknownTask)

    on_a_board(script)


def test_calls_that_find_no_worker_in_time_fail_with_the_reason() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        await ask(board, 1)
        await asyncio.sleep(61)

        assert "no worker is connected" in str(caller.errors[1])

    on_a_board(script)


def test_calls_of_an_owner_who_is_shut_out_fail() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        await worker(coordinator, holds=True)
        await ask(board, 1)

        coordinator.hub.cancel_all_of("me", "the key was revoked")
        await run_pending()

        assert isinstance(caller.errors[1], Cancelled)

    on_a_board(script)


def test_one_message_of_calls_is_one_word_to_a_lane() -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator)
        await ask(board, *range(100))  # which shows how short they are
        before = len(one.received(PushCalls))

        await ask(board, *range(200, 220))

        assert len(one.received(PushCalls)) == before + 1

    on_a_board(script)


@pytest.mark.parametrize("slots", [1, 3])
def test_lanes_never_take_more_than_a_workers_slots(slots: int) -> None:
    async def script(
        coordinator: Coordinator, board: CallScheduler, caller: Caller
    ) -> None:
        one = await worker(coordinator, slots=slots, holds=True)

        await ask(board, *range(20))

        assert len(one.streams) == slots
        kinds = {job.kind for job in coordinator.hub.pool.jobs.values()}
        assert kinds == {JobKind.CALL_STREAM}

    on_a_board(script)


def test_ways_that_wait_for_room_ask_for_no_lane_until_there_is_some() -> None:
    async def scenario() -> None:
        async with running_coordinator(queue_max=1) as coordinator:
            caller = Caller()
            clock = LoopClock(asyncio.get_running_loop().time)
            board = CallScheduler(coordinator.hub, clock, "me", caller)
            one = await worker(coordinator, holds=True)
            ways = [
                CallRoute(CallStream("add", float(n)), Priority.NORMAL, 60.0)
                for n in range(9)
            ]
            for number, way in enumerate(ways, 1):
                await ask(board, number, way=way)

            asked = int(coordinator.hub.new_id().removeprefix("job")) - 1
            assert len(one.streams) == 1
            assert asked == 2, "one has the slot, and one a place"
            board.close()

    virtual.run(scenario())
