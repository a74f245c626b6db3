"""Clients that come back to another coordinator, with what they have of an answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from coordinator.hubs import (
    CONTINUES,
    TOOL_CALL,
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    running_coordinator,
)
from shoal.domain.answer_assembly import pieces_after
from shoal.domain.errors import JobError, WorkerLost
from shoal.domain.facts import JobCancelled
from shoal.domain.job import JobTerms
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Delta
from simulation import virtual
from simulation.virtual import in_virtual_time

GATE = 2.0  # seconds
PIECES: list[AnswerPiece] = ["Once ", "upon "]

Before = Callable[[Coordinator, ScriptedWorker], Coroutine[Any, Any, list[Client]]]


@asynccontextmanager
async def taken_over(
    before: Before, hedge_after: float | None = None, await_clients: float = GATE
) -> AsyncIterator[tuple[Coordinator, list[Client]]]:
    """Run a coordinator after another one, which was killed after ``before``."""
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as first:
        clients = await before(first, await first.join())
        await run_pending()
    async with running_coordinator(
        store, hedge_after=hedge_after, await_clients=await_clients
    ) as second:
        yield second, clients
    await store.close()


async def begin(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
    """Let a worker begin an answer."""
    client = await first.request()
    worker.write(*PIECES)
    return [client]


async def come_back(
    hub: Coordinator, client: Client, seen: list[AnswerPiece] | None = None
) -> Client:
    pieces = client.pieces if seen is None else seen
    again = Client(hub.hub, client.job, pieces)
    await run_pending()
    return again


@in_virtual_time
async def test_an_answer_goes_on_after_what_its_client_has() -> None:
    async with taken_over(begin) as (second, (client,)):
        again = await come_back(second, client)
        worker = await second.join(features=CONTINUES)

        assert worker.runs[0].beginning == ["Once upon "]
        worker.write("a time")
        worker.complete()
        await run_pending()
        assert again.text == "a time"
        assert again.outcome is not None
        assert again.outcome.text == "Once upon a time"


@in_virtual_time
async def test_a_slow_start_takes_nothing_of_the_clients_time() -> None:
    async with taken_over(begin, await_clients=30 * GATE) as (second, (client,)):
        await asyncio.sleep(20 * GATE)  # ``end_return`` is not called yet
        again = await come_back(second, client)
        worker = await second.join(features=CONTINUES)
        worker.write("a time")
        worker.complete()
        await run_pending()
        assert again.outcome is not None
        assert again.outcome.text == "Once upon a time"


@in_virtual_time
async def test_a_worker_that_starts_over_repeats_what_the_client_has() -> None:
    async with taken_over(begin) as (second, (client,)):
        again = await come_back(second, client)
        worker = await second.join()

        assert worker.runs[0].beginning == []
        worker.write("Once upon ", "a time")
        worker.complete()
        await run_pending()
        assert again.text == "a time"
        assert again.outcome is not None
        assert again.outcome.text == "Once upon a time"


@in_virtual_time
async def test_a_worker_that_says_something_else_ends_the_answer() -> None:
    async with taken_over(begin) as (second, (client,)):
        again = await come_back(second, client)
        worker = await second.join()

        worker.write("There was ")
        await run_pending()
        assert isinstance(again.error, WorkerLost)
        assert again.pieces == []


@in_virtual_time
async def test_no_second_worker_gets_a_job_whose_client_has_text() -> None:
    async with taken_over(begin, hedge_after=1.0) as (second, (client,)):
        again = await come_back(second, client)
        first = await second.join(features=CONTINUES)
        other = await second.join("other")
        await asyncio.sleep(3.0)

        assert (len(first.runs), len(other.runs)) == (1, 0)
        first.write("a time")
        await run_pending()
        assert again.text == "a time"


def test_no_worker_gets_a_job_before_all_clients_have_come_back() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        return [await first.request(), await first.request()]

    async def script() -> None:
        async with taken_over(before) as (second, clients):
            worker = await second.join(slots=2)
            await come_back(second, clients[0])
            assert worker.runs == []

            await come_back(second, clients[1])

            assert len(worker.runs) == 2

    virtual.run(script())


def test_a_job_whose_client_does_not_come_back_ends_after_a_while() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        detached = JobTerms(detached=True)
        return [
            await first.request(),
            await first.request(),
            await first.request(key="k"),
            await first.request(terms=detached),
        ]

    async def script() -> None:
        async with taken_over(before) as (second, (stays, leaves, keyed, detached)):
            worker = await second.join(slots=4)
            again = await come_back(second, stays)
            assert worker.runs == []

            await asyncio.sleep(GATE)

            assert {run.job_id for run in worker.runs} == {
                again.job_id,
                keyed.job_id,
                detached.job_id,
            }
            end = (await second.history(leaves.job_id))[-1]
            assert isinstance(end, JobCancelled)
            assert end.reason == "the client left"

    virtual.run(script())


@in_virtual_time
async def test_new_jobs_are_accepted_while_clients_may_come_back() -> None:
    async with taken_over(begin) as (second, _):
        worker = await second.join()
        client = await second.request()
        assert client.accepted
        assert worker.runs == []

        await asyncio.sleep(GATE)

        assert [run.job_id for run in worker.runs] == [client.job_id]


@in_virtual_time
async def test_a_full_queue_refuses_jobs_while_clients_may_come_back() -> None:
    async with taken_over(begin) as (second, _):
        await second.join(slots=9)
        second.hub._queue_max = 2

        clients = [await second.request() for _ in range(3)]

        assert [each.error is None for each in clients] == [True, False, False]


def test_of_two_readers_the_longest_beginning_counts() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        client = await first.request(key="k")
        worker.write(*PIECES)
        await run_pending()
        return [client, Client(first.hub, client.job)]

    async def script() -> None:
        async with taken_over(before) as (second, (one, other)):
            shorter = await come_back(second, one, ["On"])
            longer = await come_back(second, other)
            worker = await second.join(features=CONTINUES)

            assert worker.runs[0].beginning == ["Once upon "]
            worker.write("a time")
            await run_pending()
            assert shorter.text == "ce upon a time"
            assert longer.text == "a time"

            stranger = await come_back(second, one, ["Two "])
            assert isinstance(stranger.error, WorkerLost)

    virtual.run(script())


def test_an_answer_that_is_more_than_text_ends_with_an_error() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        client = await first.request()
        worker.write(TOOL_CALL)
        return [client]

    async def script() -> None:
        async with taken_over(before) as (second, (client,)):
            again = await come_back(second, client)
            await second.join(features=CONTINUES)

            assert isinstance(again.error, WorkerLost)

    virtual.run(script())


def test_a_client_gets_the_rest_of_an_answer_that_has_ended() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        clients = await begin(first, worker)
        await run_pending()
        worker.write("a time")
        worker.complete()
        return clients

    async def script() -> None:
        async with taken_over(before) as (second, (client,)):
            again = await come_back(second, client, PIECES)

            assert again.text == "a time"
            assert again.outcome is not None
            assert again.outcome.text == "Once upon a time"

    virtual.run(script())


def test_a_client_learns_how_a_job_without_an_answer_ended() -> None:
    async def before(first: Coordinator, worker: ScriptedWorker) -> list[Client]:
        clients = await begin(first, worker)
        first.hub.cancel(clients[0].job_id, "enough")
        return clients

    async def script() -> None:
        async with taken_over(before) as (second, (client,)):
            again = await come_back(second, client)

            assert isinstance(again.error, JobError)
            assert str(again.error) == "enough"

    virtual.run(script())


@in_virtual_time
async def test_a_job_that_was_never_accepted_is_submitted_by_its_client() -> None:
    async with taken_over(begin) as (second, _):
        await asyncio.sleep(GATE)
        worker = await second.join()

        client = Client(second.hub, second.job(), [])
        await run_pending()

        assert [run.job_id for run in worker.runs] == [client.job.id]
        assert client.accepted


def test_pieces_after_a_beginning() -> None:
    def thought(text: str) -> Delta:
        return Delta(0, {THOUGHTS: text})

    whole: list[AnswerPiece] = [thought("hm"), "ab", "cd", TOOL_CALL, "e"]

    cases: list[tuple[list[AnswerPiece], list[AnswerPiece] | None]] = [
        ([], [thought("hm"), "abcd", TOOL_CALL, "e"]),
        ([thought("h")], [thought("m"), "abcd", TOOL_CALL, "e"]),
        ([thought("h"), thought("m"), "a"], ["bcd", TOOL_CALL, "e"]),
        ([thought("hm"), "abcd"], [TOOL_CALL, "e"]),
        ([thought("hm"), "abcd", TOOL_CALL, "e"], []),
        ([thought("h"), "abcd"], None),
        (["ab"], None),
        ([thought("hm"), "abc", TOOL_CALL], None),
        ([thought("hm"), "abcd", TOOL_CALL, "e", "f"], None),
    ]
    for begun, rest in cases:
        assert pieces_after(whole, begun) == rest
