"""Jobs that peers submit: they run in the local pool, and in no third one."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from msgspec import structs

from coordinator.hubs import ScriptedWorker, run_pending, running_coordinator
from coordinator.test_placer import QWEN, ScriptedMachine
from ledger.builders import PRICES
from peers.scripted_peers import (
    PeerCoordinator,
    ScriptedConnection,
    accept_peers,
    connected,
    offer,
    requested_chat,
)
from shoal.coordinator.answer_reader import SLOW_SECONDS
from shoal.domain.errors import (
    CannotDo,
    ContextExceeded,
    InvalidRequest,
    JobError,
    NoWorker,
    QueueFull,
    ShoalError,
    ShuttingDown,
    StoreError,
    TooLarge,
    UnknownModel,
    Unprocessable,
    WorkerLost,
)
from shoal.domain.facts import JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, TimeLimits
from shoal.domain.moderation import UNCHECKED_MAX, Moderation
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import JobKind, ModelAction, ModelOrder, Task
from shoal.peers.connections import ANNOUNCE_INTERVAL
from shoal.peers.inbound_jobs import (
    DEFAULT_POLICY,
    JOBS_MAX,
    PeerJobPolicy,
    rejection_of,
)
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft
from simulation import virtual
from simulation.virtual import in_virtual_time, scripted

ONE = LeaseNumber(1)
OWN_SLOTS = 100
SUBMITTER = PeerJoined("mac", submits_jobs=True)


def play(
    script: Callable[
        [PeerCoordinator, ScriptedConnection, ScriptedWorker], Awaitable[None]
    ],
    queue_max: int = 1000,
    policy: PeerJobPolicy = DEFAULT_POLICY,
) -> None:
    """Run a script with a peer 'a' that may submit jobs, and a local worker."""

    async def scenario() -> None:
        async with running_coordinator(queue_max=queue_max) as coordinator:
            peers = await accept_peers(coordinator, policy)
            own = await coordinator.join("own", slots=OWN_SLOTS)
            line = await peers.connect()
            line.emit("a", SUBMITTER)
            await run_pending()
            await script(peers, line, own)

    virtual.run(scenario())


async def send(line: ScriptedConnection, *words: RunJob | CancelJob | PeerLeft) -> None:
    line.emit("a", *words)
    await run_pending()


def ends_of(line: ScriptedConnection) -> list[Event]:
    """Return the ends of jobs that the peer received."""
    kinds: tuple[type[Event], ...] = (Completed, Rejected, Failed)
    return [end for kind in kinds for end in line.received("a", kind)]


@scripted(play)
async def test_answer_is_streamed_to_a_peer_under_its_job_id(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat("theirs"))
    own.write("one ", "two")
    await run_pending()
    assert line.received("a", AnswerChunk) == [
        AnswerChunk(JobId("theirs"), ONE, ["one ", "two"])
    ]

    own.complete()
    await run_pending()

    assert ends_of(line) == [Completed(JobId("theirs"), ONE)]


@scripted(play)
async def test_a_peer_cannot_order_what_the_pools_machines_load(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    machine = ScriptedMachine(peers.coordinator.hub, "anna", QWEN)
    await run_pending()
    order = ModelOrder(ModelAction.LOAD, QWEN.name, "wire:anna/*models")

    await send(line, RunJob(JobId("theirs"), ONE, order))

    (end,) = ends_of(line)
    assert isinstance(end, Rejected)
    assert "own coordinator" in end.reason
    assert not machine.runs


def test_job_of_a_peer_has_its_owner_price_and_limits() -> None:
    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        facts: list[object] = []
        peers.coordinator.hub.subscribe(facts.extend)

        await send(line, requested_chat())

        (job,) = [fact.job for fact in facts if isinstance(fact, JobSubmitted)]
        assert job.owner == "wire:mac"
        assert job.terms.near
        assert job.terms.price == PRICES.fast_inference
        assert job.limits == DEFAULT_POLICY.limits
        assert job.id != "theirs"

    play(script, policy=PeerJobPolicy(prices=PRICES))


@scripted(play)
async def test_job_of_a_peer_has_what_remains_of_its_limit_there(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    facts: list[object] = []
    peers.coordinator.hub.subscribe(facts.extend)

    await send(line, structs.replace(requested_chat(), remaining=7.0))

    (job,) = [fact.job for fact in facts if isinstance(fact, JobSubmitted)]
    assert job.limits == structs.replace(DEFAULT_POLICY.limits, total=7.0)
    assert [run.remaining for run in own.runs] == [7.0]


@scripted(play)
async def test_job_without_a_model_runs_anywhere(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat(model=""))

    assert [run.work.model for run in own.runs] == ["*"]


@scripted(play)
async def test_owner_of_a_peers_jobs_is_a_separate_account(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    line.emit("b", PeerJoined("default/user", submits_jobs=True), requested_chat())
    await run_pending()

    (job,) = peers.coordinator.hub.pool.jobs.values()
    assert job.job.owner == "wire:default%2Fuser"


@scripted(play)
async def test_cancellation_by_a_peer_frees_the_worker(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat("x"), requested_chat("y"))

    await send(line, CancelJob(JobId("x"), ONE), CancelJob(JobId("?"), ONE))

    assert len(own.cancelled) == 1
    assert len(peers.coordinator.hub.pool.jobs) == 1
    assert ends_of(line) == []
    await send(line, requested_chat("x"))  # the id is free again
    assert len(peers.coordinator.hub.pool.jobs) == 2


@pytest.mark.parametrize("how", ["gone", "cut", "replaced"])
def test_disconnected_peer_leaves_no_jobs(how: str) -> None:
    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        await send(line, requested_chat("x"), requested_chat("y"))
        assert len(peers.coordinator.hub.pool.jobs) == 2

        if how == "gone":
            await send(line, PeerLeft("bye"))
        elif how == "cut":
            await line.end()
        else:
            line.emit("b", SUBMITTER)
            await run_pending()

        assert not peers.coordinator.hub.pool.jobs
        assert len(own.cancelled) == 2

    play(script)


@scripted(play)
async def test_duplicate_job_runs_once(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat("x"), requested_chat("x"))
    own.complete()
    await run_pending()

    assert len(own.runs) == 1
    assert len(ends_of(line)) == 1


@scripted(play)
async def test_unauthorized_peer_is_rejected_with_a_hint(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    line.emit("b", PeerJoined("worker"), requested_chat())
    await run_pending()

    (rejected,) = line.received("b", Rejected)
    assert "passcode" in rejected.reason
    assert own.runs == []


@scripted(play)
async def test_a_job_of_a_peer_never_runs_on_that_peer(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    line.emit("a", OffersChanged((offer("m"), offer("theirs"))))
    await run_pending()

    await send(line, *(requested_chat(f"job {number}") for number in range(OWN_SLOTS)))
    await send(line, requested_chat("circle", "theirs"))

    assert line.received("a", RunJob) == []
    (rejected,) = line.received("a", Rejected)
    assert rejected.job_id == "circle"
    assert "only the peer that requests theirs has it" in rejected.reason


def test_a_rejected_job_is_freed_at_once() -> None:
    # Otherwise a flood keeps its prompts until the garbage collector runs.
    def kept() -> int:
        return sum(isinstance(each, Job) for each in gc.get_objects())

    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        gc.collect()
        before = kept()
        gc.disable()
        try:
            for number in range(3):
                await send(line, requested_chat(f"j{number}", model="unknown"))
            assert len(line.received("a", Rejected)) == 3
            assert kept() == before
        finally:
            gc.enable()

    play(script)


@scripted(play)
async def test_started_answer_is_rejected(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat(continues="once upon"))

    (rejected,) = line.received("a", Rejected)
    assert "another pool began" in rejected.reason


@scripted(play)
async def test_peer_has_as_many_jobs_open_as_there_are_slots_and_no_more(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    assert OWN_SLOTS > JOBS_MAX
    await send(
        line, *(requested_chat(f"job {number}") for number in range(OWN_SLOTS + 1))
    )

    assert len(own.runs) == OWN_SLOTS
    (rejected,) = line.received("a", Rejected)
    assert rejected.job_id == f"job {OWN_SLOTS}"
    assert str(OWN_SLOTS) in rejected.reason
    own.complete()
    await run_pending()
    await send(line, requested_chat("another"))
    assert len(line.received("a", Rejected)) == 1


def test_full_queue_is_reported() -> None:
    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        await peers.coordinator.join("slow", "n")
        for number in range(3):
            await send(line, requested_chat(f"job {number}", "n"))

        (rejected,) = line.received("a", Rejected)
        assert rejected.job_id == "job 2"

    play(script, queue_max=1)


@scripted(play)
async def test_model_of_other_pools_is_rejected_at_once(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    line.emit("b", PeerJoined("pool"), OffersChanged((offer("far", neighbour=True),)))
    await run_pending()

    await send(line, requested_chat("x", "far"))

    (rejected,) = line.received("a", Rejected)
    assert "only other pools have far" in rejected.reason
    assert line.received("b", RunJob) == []


@scripted(play)
async def test_failure_of_a_worker_is_forwarded(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat())
    (run,) = own.runs
    own.emit(Failed(run.job_id, run.lease, "too long", Fault.CONTEXT))
    await run_pending()

    assert ends_of(line) == [Failed(JobId("theirs"), ONE, "too long", Fault.CONTEXT)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFull("x"), None),
        (NoWorker("x"), None),
        (UnknownModel("x"), None),
        (CannotDo("x"), None),
        (ShuttingDown("x"), None),
        (WorkerLost("x"), None),
        (StoreError("x"), None),
        (JobError("x"), Fault.WORKER),
        (InvalidRequest("x"), Fault.REQUEST),
        (ContextExceeded("x"), Fault.CONTEXT),
        (TooLarge("x"), Fault.SIZE),
        (Unprocessable("x"), Fault.VALUES),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, ShoalError) else "",
)
def test_recoverable_failure_is_a_rejection(
    error: ShoalError, kind: Fault | None
) -> None:
    end = rejection_of(requested_chat("x"), error)

    if kind is None:
        assert end == Rejected(JobId("x"), ONE, "x")
    else:
        assert end == Failed(JobId("x"), ONE, "x", kind)


@scripted(play)
async def test_slow_peer_loses_only_its_own_job(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    await send(line, requested_chat("x"))
    line.link.writable.clear()
    client = await peers.coordinator.request()
    piece = "x" * (256 << 10)

    for _ in range(40):
        own.write(piece, run=0)
        own.write("y", run=1)
        await asyncio.sleep(SLOW_SECONDS / 20)
    own.complete(run=1)
    line.link.writable.set()
    await run_pending()

    assert client.text == "y" * 40
    (failed,) = line.received("a", Failed)
    assert "reads too slowly" in failed.error
    assert len(own.cancelled) == 1


@scripted(play)
async def test_tasks_run_for_peers(
    peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
) -> None:
    doer = await peers.coordinator.join("doer", "t", kinds=frozenset({JobKind.TASK}))
    task = structs.replace(
        requested_chat("x"), work=Task("classify", {"input": "text"})
    )

    await send(line, task)
    doer.write('{"label":"a"}')
    doer.complete()
    await run_pending()

    assert line.received("a", AnswerChunk)[0].pieces == ['{"label":"a"}']


@in_virtual_time
async def test_policy_limits_apply() -> None:
    async with running_coordinator() as coordinator:
        peers = await accept_peers(
            coordinator, replace(DEFAULT_POLICY, limits=TimeLimits(queue=2.0))
        )
        await coordinator.join("w", "n")
        line = await peers.connect()
        line.emit("a", SUBMITTER, requested_chat("x", "n"), requested_chat("y", "n"))
        await asyncio.sleep(3.0)

        (rejected,) = line.received("a", Rejected)
        assert rejected.job_id == "y"
        assert "over the limit of 2 s" in rejected.reason


# Two coordinators that are each other's peers.


def two_pools(
    script: Callable[[PeerCoordinator, PeerCoordinator], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        async with running_coordinator() as one, running_coordinator() as other:
            peers, there = await accept_peers(one), await accept_peers(other)
            async with connected(peers, there):
                await script(peers, there)

    virtual.run(scenario())


def test_pool_runs_jobs_of_its_peer() -> None:
    async def script(peers: PeerCoordinator, there: PeerCoordinator) -> None:
        worker = await there.coordinator.join("w", "m")
        await asyncio.sleep(ANNOUNCE_INTERVAL)
        assert peers.workers == ["wire:other/m"]

        client = await peers.coordinator.request()
        worker.write("from ", "there")
        worker.complete()
        await run_pending()

        assert client.text == "from there"
        assert client.outcome is not None

    two_pools(script)


def test_job_is_not_forwarded_in_a_circle() -> None:
    async def script(peers: PeerCoordinator, there: PeerCoordinator) -> None:
        worker = await there.coordinator.join("w", "m")
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
        assert there.workers == ["wire:w"]  # its own models are not offered back

        client = await peers.coordinator.request()
        worker.port.on_disconnect("cut off")
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)

        # It waits there for a worker with the model, and is not forwarded.
        (mirror,) = peers.coordinator.hub.pool.workers.values()
        assert mirror.draining == "no longer loaded"
        assert there.workers == []
        assert len(there.coordinator.hub.pool.jobs) == 1

        await asyncio.sleep(TimeLimits().queue * 3)

        assert isinstance(client.error, NoWorker)
        assert peers.workers == there.workers == []
        assert not peers.coordinator.hub.pool.jobs
        assert not there.coordinator.hub.pool.jobs

    two_pools(script)


def test_pools_with_the_same_model_share_jobs() -> None:
    async def script(peers: PeerCoordinator, there: PeerCoordinator) -> None:
        near, far = await peers.coordinator.join("w"), await there.coordinator.join("w")
        await asyncio.sleep(ANNOUNCE_INTERVAL)
        clients = [await peers.coordinator.request() for _ in range(3)]

        assert (len(near.runs), len(far.runs)) == (1, 1)
        assert far.runs[0].terms.near
        for member in (near, far):
            member.complete()
        await run_pending()
        near.complete()
        far.complete()
        await run_pending()

        assert sum(client.outcome is not None for client in clients) == 3

    two_pools(script)


def test_client_disconnect_frees_the_worker_of_the_peer() -> None:
    async def script(peers: PeerCoordinator, there: PeerCoordinator) -> None:
        worker = await there.coordinator.join("w")
        await asyncio.sleep(ANNOUNCE_INTERVAL)
        client = await peers.coordinator.request()
        assert len(worker.runs) == 1

        await client.disconnect()
        await run_pending()

        assert len(worker.cancelled) == 1
        assert not peers.coordinator.hub.pool.jobs
        assert not there.coordinator.hub.pool.jobs

    two_pools(script)


def test_moderated_request_is_rejected() -> None:
    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        await send(line, requested_chat())

        (failed,) = ends_of(line)
        assert isinstance(failed, Failed)
        assert failed.fault is Fault.REQUEST
        assert "moderation" in failed.error
        assert not own.runs

    play(script, policy=PeerJobPolicy(moderation=Moderation(".*")))


def test_moderated_answer_ends_and_frees_the_worker() -> None:
    async def script(
        peers: PeerCoordinator, line: ScriptedConnection, own: ScriptedWorker
    ) -> None:
        await send(line, requested_chat())

        own.write("x" * UNCHECKED_MAX, "secret")
        await run_pending()

        assert ends_of(line) == [Completed(JobId("theirs"), ONE, "content_filter")]
        assert any(isinstance(word, CancelJob) for word in own.commands)

    play(script, policy=PeerJobPolicy(moderation=Moderation("secret")))
