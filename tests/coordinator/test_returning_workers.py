"""Workers that come back, and still run what they had before their connection broke."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from coordinator.hubs import (
    CONTINUES,
    TOOL_CALL,
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator.recovery import RETURN_GRACE
from shoal.domain.errors import WorkerLost
from shoal.domain.facts import JobLeased
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Delta
from shoal.domain.vocabulary import AnswerChunk, CancelJob, RunJob, RunningJobNames
from shoal.domain.work import Chat
from shoal.pool.react import STILL_RUNS
from shoal.pool.state import LOSS_GRACE
from simulation import virtual
from simulation.virtual import in_virtual_time, scripted

GATE = 2.0  # seconds
PIECES: list[AnswerPiece] = ["Once ", "upon "]


def named(run: RunJob) -> RunningJobNames:
    """Return how a worker names the job of a command when it comes back."""
    return ((run.job_id, run.lease),)


@asynccontextmanager
async def taken_over(
    *pieces: AnswerPiece, await_clients: float = 0.0, key: str = ""
) -> AsyncIterator[tuple[Coordinator, Client, RunJob]]:
    """Run a coordinator after another one, which was killed while a worker answered."""
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as first:
        worker = await first.join(running=())
        client = await first.request(key=key)
        worker.write(*pieces)
        await run_pending()
        run = worker.runs[0]
    async with running_coordinator(store, await_clients=await_clients) as second:
        yield second, client, run
    await store.close()


async def come_back(hub: Coordinator, client: Client) -> Client:
    again = Client(hub.hub, client.job, client.pieces)
    await run_pending()
    return again


@in_virtual_time
async def test_a_worker_goes_on_at_another_coordinator_which_has_no_text() -> None:
    async with taken_over(*PIECES, key="a key") as (second, client, run):
        worker = await second.join(running=named(run))

        (again,) = worker.runs
        assert (again.resumes, again.lease) == (run.lease, run.lease + 1)
        assert again.beginning == []  # so the worker sends all of it again
        worker.write(*PIECES, "a time")
        worker.complete()
        late = Client(second.hub, client.job)
        await run_pending()
        assert late.text == "Once upon a time"
        leases = [
            fact
            for fact in await second.history(run.job_id)
            if isinstance(fact, JobLeased)
        ]
        assert [each.reason == STILL_RUNS for each in leases] == [False, True]


def test_a_worker_goes_on_after_what_the_client_has_though_it_comes_first() -> None:
    thoughts = Delta(0, {THOUGHTS: "Hm. "})

    async def script() -> None:
        async with taken_over(thoughts, *PIECES, await_clients=GATE) as (
            second,
            client,
            run,
        ):
            worker = await second.join(running=named(run))
            assert worker.runs == []  # a client may bring text

            again = await come_back(second, client)
            (resumed,) = worker.runs
            assert resumed.resumes == run.lease
            # It can continue no answer, but has this one.
            assert resumed.beginning == [thoughts, "Once upon "]
            worker.write("a time")
            worker.complete()
            await run_pending()
            assert again.text == "a time"
            assert again.outcome is not None
            assert again.outcome.text == "Once upon a time"

    virtual.run(script())


@pytest.mark.parametrize("stops", [True, False])
@in_virtual_time
async def test_connections_that_break_before_the_coordinator_ends_change_nothing(
    stops: bool,
) -> None:
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as first:
        worker = await first.join(running=())
        await first.request(key="a key")
        run = worker.runs[0]
        if stops:
            other = await first.join("other", running=())
            first.hub.leave_all("stopping")
            other.port.on_disconnect("closed")
        worker.port.on_disconnect("closed")
        await run_pending()
    async with running_coordinator(store) as second:
        other = await second.join("other", running=())
        assert other.runs == []
        worker = await second.join(running=named(run))
        assert [each.resumes for each in worker.runs] == [run.lease]
    await store.close()


@in_virtual_time
async def test_a_job_whose_client_does_not_come_back_is_stopped() -> None:
    async with taken_over(await_clients=GATE) as (second, _, run):
        worker = await second.join(running=named(run))
        second.hub.cancel(run.job_id, "an operator")
        await asyncio.sleep(GATE)
        assert worker.runs == []
        stopped = [e for e in worker.commands if isinstance(e, CancelJob)]
        # The worker knows only the lease under which it runs the job.
        assert CancelJob(run.job_id, run.lease) in stopped


def test_an_answer_of_more_than_text_comes_again_as_a_whole() -> None:
    other_call = Delta(0, {"tool_calls": [{"index": 1, "function": {"name": "g"}}]})

    async def unread() -> None:
        async with taken_over(TOOL_CALL, key="a key") as (second, _, run):
            worker = await second.join(running=named(run))
            assert worker.runs[0].resumes == run.lease
            assert worker.runs[0].beginning == []

    async def read(whole: list[AnswerPiece]) -> Client:
        async with taken_over("Hm", TOOL_CALL, await_clients=GATE) as (
            second,
            client,
            run,
        ):
            worker = await second.join(running=named(run))
            again = await come_back(second, client)
            assert worker.runs[0].beginning == []
            if whole:
                job = worker.runs[0]
                worker.emit(AnswerChunk(job.job_id, job.lease, whole))
            worker.complete()
            await run_pending()
            return again

    virtual.run(unread())
    again = virtual.run(read(["Hm", TOOL_CALL, other_call]))
    assert again.pieces == [other_call]
    assert again.outcome is not None
    others: list[list[AnswerPiece]] = [["Hm", other_call], ["Hm"], []]
    for other in others:
        assert isinstance(virtual.run(read(other)).error, WorkerLost)


@in_virtual_time
async def test_a_job_waits_for_its_worker_only_for_a_while() -> None:
    async with taken_over(*PIECES) as (second, _, run):
        other = await second.join("other", running=())
        assert other.runs == []
        waits = second.hub.waits_for(run.job_id)
        assert waits is not None
        assert "reconnect" in waits

        await asyncio.sleep(RETURN_GRACE)
        assert [each.resumes for each in other.runs] == [0]

        late = await second.join(running=named(run))
        assert late.runs == []
        assert late.cancelled == [run.job_id]


@in_virtual_time
async def test_a_job_does_not_wait_for_a_worker_that_has_it_no_more() -> None:
    async with taken_over(*PIECES) as (second, _, run):
        other = await second.join("other", running=())
        assert other.runs == []
        await second.join(model="another model", running=())
        assert [each.job_id for each in other.runs] == [run.job_id]


@in_virtual_time
async def test_a_job_does_not_wait_for_a_worker_that_keeps_none() -> None:
    store = SlowStore()
    await store.open()
    async with running_coordinator(store) as first:
        await first.join()
        await first.request(key="a key")
    async with running_coordinator(store) as second:
        other = await second.join("other")
        assert len(other.runs) == 1
    await store.close()


@scripted(run_script)
async def test_unknown_jobs_and_other_leases_are_stopped(
    coordinator: Coordinator,
) -> None:
    await coordinator.join("first", running=())
    client = await coordinator.request()

    names = (
        (JobId("unknown"), LeaseNumber(1)),
        (client.job_id, LeaseNumber(1)),
        (client.job_id, LeaseNumber(7)),
    )
    liar = await coordinator.join("liar", running=names)

    assert liar.runs == []
    assert set(liar.cancelled) == {JobId("unknown"), client.job_id}


async def cut_and_return(
    coordinator: Coordinator, worker: ScriptedWorker, run: RunJob
) -> ScriptedWorker:
    worker.port.on_disconnect("connection reset")
    await run_pending()
    return await coordinator.join(running=named(run))


@scripted(run_script)
async def test_a_worker_goes_on_at_the_same_coordinator(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    client = await coordinator.request()
    # As often as its connection breaks: the worker was not lost.
    for piece in "Once":
        worker.write(piece)
        await run_pending()
        worker = await cut_and_return(coordinator, worker, worker.runs[-1])
    worker.write("!")
    worker.complete()
    await run_pending()

    assert client.text == "Once!"
    assert worker.runs[0].continues == "Once"


@scripted(run_script)
async def test_another_model_of_its_machine_does_not_stop_its_job(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join("w/m", running=())
    await coordinator.request()
    names = named(worker.runs[0])
    worker.port.on_disconnect("connection reset")
    await run_pending()
    # Both name all that their machine runs, which has one connection.
    back = await coordinator.join("w/m", running=names)
    other = await coordinator.join("w/other", "other", running=names)

    assert [each.resumes for each in back.runs] == [1]
    assert back.cancelled == other.cancelled == []


@scripted(run_script)
async def test_a_newer_connection_keeps_the_jobs_of_the_older(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(slots=2, running=())
    client = await coordinator.request()
    lent = await coordinator.request()
    names = named(worker.runs[0]) + named(worker.runs[1])
    # It has fewer slots now.
    newer = await coordinator.join(slots=1, running=names)

    assert [each.resumes for each in newer.runs] == [1, 1]
    newer.complete(0)
    newer.complete(1)
    await run_pending()
    assert client.outcome is not None
    assert lent.outcome is not None


@scripted(run_script)
async def test_a_job_of_a_lost_worker_goes_to_another_that_is_free(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    await coordinator.request()
    other = await coordinator.join("other", running=())
    returned = await cut_and_return(coordinator, worker, worker.runs[0])

    assert len(other.runs) == 1
    assert returned.runs == []
    assert returned.cancelled == [worker.runs[0].job_id]


@scripted(run_script)
async def test_a_job_that_ends_in_the_moment_of_the_return_is_stopped(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    client = await coordinator.request()
    run = worker.runs[0]
    worker.port.on_disconnect("connection reset")
    await run_pending()
    returning = ScriptedWorker(coordinator.hub, running=named(run))
    coordinator.hub.cancel(client.job_id, "the client left")
    await run_pending()

    assert returning.runs == []
    assert run.job_id in returning.cancelled


SAMPLED = 1.0  # a temperature at which no worker repeats an answer


async def sampled(coordinator: Coordinator) -> Client:
    job = coordinator.job()
    assert isinstance(job.work, Chat)
    work = replace(job.work, temperature=SAMPLED)
    client = Client(coordinator.hub, replace(job, work=work))
    await run_pending()
    return client


@scripted(run_script)
async def test_an_answer_that_no_other_can_go_on_with_waits_for_its_worker(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    client = await sampled(coordinator)
    worker.write("Once ")
    await asyncio.sleep(1.0)
    other = await coordinator.join("other", running=())
    worker.port.on_disconnect("connection reset")
    await asyncio.sleep(LOSS_GRACE / 2)
    assert client.error is None
    returned = await coordinator.join(running=named(worker.runs[0]))
    returned.write("upon")
    returned.complete()
    await run_pending()

    assert client.text == "Once upon"
    assert client.outcome is not None
    assert other.runs == []


@scripted(run_script)
async def test_it_ends_if_its_worker_does_not_come_back(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    client = await sampled(coordinator)
    worker.write("Once ")
    await asyncio.sleep(1.0)
    await coordinator.join("other", running=())
    worker.port.on_disconnect("connection reset")
    await asyncio.sleep(LOSS_GRACE + 0.1)

    assert isinstance(client.error, WorkerLost)


@scripted(run_script)
async def test_what_another_worker_continues_does_not_wait(
    coordinator: Coordinator,
) -> None:
    worker = await coordinator.join(running=())
    await sampled(coordinator)
    worker.write("Once ")
    await asyncio.sleep(1.0)
    other = await coordinator.join("other", running=(), features=CONTINUES)
    worker.port.on_disconnect("connection reset")
    await run_pending()

    assert other.runs[0].continues == "Once "
