"""Peers that run calls, and peers that submit calls."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from calls.function_workers import call, pack, unpack
from calls.test_scheduler import ROUTE, RecordedCalls
from coordinator.hubs import Coordinator, run_pending, run_script
from peers.scripted_peers import PeerCoordinator, ScriptedConnection, accept_peers
from shoal.calls.group import IDLE_MAX, CallGroup
from shoal.calls.scheduler import CallScheduler
from shoal.calls.stream import OpenCallStream
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    BlobMissing,
    CallProgress,
    CallResult,
    CallsReturned,
    CancelJob,
    Completed,
    Failed,
    OffersChanged,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import Call, CallStream, Feature, JobKind, Work
from shoal.domain.worker import Offer
from shoal.pool.functions import CALL_GRACE_SECONDS, call_limits
from shoal.pool.inputs import WorkerApproval
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.transports.clock import LoopClock

OFFER = Offer(
    frozenset({JobKind.CALL, JobKind.CALL_STREAM}),
    slots=2,
    features=frozenset({Feature.VALUES}),
    tasks=frozenset({"add"}),
)
BLOB = pack("large")
DIGEST = hashlib.sha256(BLOB).digest()


class RecordedReports:
    """Records the reports about a call."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.end: object = None

    def on_accepted(self, job_id: JobId) -> None:
        self.told.append("accepted")

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        self.told.append("leased")

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        self.told.append((share, remark))

    def on_results(self, returns: list[CallResult]) -> None:
        self.told.append(returns)

    def on_end(self, job: EndedJob) -> None:
        self.end = job.end

    def runs(self, number: int) -> bool:
        return False


class RecordingStreamOwner:
    """Opens a call stream without pushing calls."""

    def on_open(self, stream: OpenCallStream) -> None:
        pass

    def on_results(self, stream: OpenCallStream, returns: list[CallResult]) -> None:
        pass

    def on_end(self, stream: OpenCallStream, error: ShoalError) -> None:
        pass

    def runs(self, stream: OpenCallStream, number: int) -> bool:
        return False


Script = Callable[[Coordinator, PeerCoordinator, ScriptedConnection], Awaitable[None]]


def with_a_peer(
    script: Script,
    *,
    offers: tuple[Offer, ...] = (OFFER,),
    asks: bool = False,
    cancels: bool = True,
) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        there = await accept_peers(coordinator)
        line = await there.connect()
        line.emit("1", PeerJoined("peer", cancels=cancels, submits_jobs=asks))
        line.emit("1", OffersChanged(offers))
        await run_pending()
        await script(coordinator, there, line)
        await line.end()

    run_script(scenario)


async def ask(coordinator: Coordinator, work: Call) -> RecordedReports:
    asker = RecordedReports()
    limits = call_limits(work.timeout)
    coordinator.hub.submit(Job(coordinator.hub.new_id(), work, limits, "me"), asker)
    await run_pending()
    return asker


def test_peer_without_models_is_a_worker_by_its_name() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        assert there.workers == ["wire:peer"]

    with_a_peer(script)


def test_peer_runs_a_call_and_returns_the_value() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        asker = await ask(coordinator, call("add", 1, 2))
        (run,) = line.received("1", RunJob)

        line.emit("1", CallProgress(run.job_id, run.lease, 0.5, "half"))
        line.emit("1", Completed(run.job_id, run.lease, value=pack(3)))
        await run_pending()

        assert asker.told == ["accepted", "leased", (0.5, "half")]
        assert getattr(asker.end, "value", None) == pack(3)
        stored = await coordinator.store.job(run.job_id)
        assert stored is not None
        assert stored.outcome == asker.end

    with_a_peer(script)


def test_progress_of_a_call_resets_the_silence_limit() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        work = Call("add", pack([]), pack({}), timeout=1.0)
        asker = await ask(coordinator, work)
        (run,) = line.received("1", RunJob)
        for _ in range(3):
            await asyncio.sleep(CALL_GRACE_SECONDS)
            line.emit("1", CallProgress(run.job_id, run.lease))
            await run_pending()
        assert asker.end is None

        await asyncio.sleep(CALL_GRACE_SECONDS + 2)

        assert "waiting for more output" in str(asker.end)
        assert line.received("1", CancelJob)

    with_a_peer(script)


def test_call_streams_run_at_a_peer_and_are_closed() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        caller = RecordedCalls()
        clock = LoopClock(asyncio.get_running_loop().time)
        scheduler = CallScheduler(coordinator.hub, clock, "me", caller)
        scheduler.submit(ROUTE, StreamedCall(7, pack([1]), pack({})))
        scheduler.flush()
        await run_pending()
        (run,) = line.received("1", RunJob)
        (push,) = line.received("1", PushCalls)

        line.emit("1", CallsReturned(run.job_id, run.lease, [CallResult(7, pack(3))]))
        await run_pending()
        assert caller.values == {7: 3}
        await asyncio.sleep(IDLE_MAX + 1)

        assert push.calls == [StreamedCall(7, pack([1]), pack({}))]
        assert line.received("1", CancelJob) == [CancelJob(run.job_id, run.lease)]
        assert coordinator.hub.pool.jobs == {}
        scheduler.close()

    with_a_peer(script)


def test_call_stream_without_cancellation_ends_when_its_worker_reports() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        stream = OpenCallStream(
            coordinator.hub,
            "me",
            CallStream("add"),
            Priority.NORMAL,
            9.0,
            cast(CallGroup, RecordingStreamOwner()),
        )
        await run_pending()
        (run,) = line.received("1", RunJob)
        (worker,) = coordinator.hub.pool.workers.values()

        coordinator.hub.cancel(stream.job_id, "its key was revoked")
        await run_pending()
        assert line.received("1", CancelJob) == [CancelJob(run.job_id, run.lease)]
        assert worker.leases == {run.job_id: run.lease}
        line.emit("1", Completed(run.job_id, run.lease))
        await run_pending()

        assert worker.leases == {}

    with_a_peer(script, cancels=False)


def test_idle_call_stream_ends_when_its_worker_reports() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        stream = OpenCallStream(
            coordinator.hub,
            "me",
            CallStream("add"),
            Priority.NORMAL,
            9.0,
            cast(CallGroup, RecordingStreamOwner()),
        )
        await run_pending()
        (run,) = line.received("1", RunJob)

        stream.close(idle=True)
        await run_pending()
        assert line.received("1", CancelJob) == [CancelJob(run.job_id, run.lease)]
        assert run.job_id in coordinator.hub.pool.jobs
        line.emit("1", Completed(run.job_id, run.lease))
        await run_pending()

        assert coordinator.hub.pool.jobs == {}

    with_a_peer(script, cancels=False)


def test_worker_whose_approval_has_ended_gets_the_values_of_its_jobs() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        hub = coordinator.hub
        hub.blobs._store.keep(BLOB)  # as a thread would, which virtual time lacks
        await ask(coordinator, Call("add", pack([]), pack({}), blobs=(DIGEST,)))
        hub.pool.approvals.required = True
        await hub.process(WorkerApproval("wire:another", "al"))
        assert all(peer.is_pending for peer in there.connections._peers.values())

        line.emit("1", BlobMissing(DIGEST))
        await run_pending()

        assert len(line.received("1", SendBlob)) == 2

    with_a_peer(script)


def test_referenced_value_is_sent_first_and_again_if_missing() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        coordinator.hub.blobs._store.keep(
            BLOB
        )  # as a thread would, which virtual time lacks
        work = Call("add", pack([]), pack({}), blobs=(DIGEST,))
        await ask(coordinator, work)
        await ask(coordinator, work)
        words = [type(said.message) for said in line.sent if said.peer == "1"]
        assert words == [SendBlob, RunJob, RunJob]

        line.emit("1", BlobMissing(DIGEST))
        await run_pending()

        assert [bytes(each.data) for each in line.received("1", SendBlob)] == [BLOB] * 2

    with_a_peer(script)


# Calls that peers submit.


async def asked(line: ScriptedConnection, work: Work, number: str = "theirs") -> None:
    line.emit("2", RunJob(JobId(number), LeaseNumber(1), work))
    await run_pending()


def test_call_of_a_peer_is_a_local_job_in_memory() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        line.emit("2", PeerJoined("dispatcher", cancels=True, submits_jobs=True))
        await asked(line, call("add", 1, 2))
        (run,) = line.received("1", RunJob)
        opened = coordinator.hub.pool.jobs[run.job_id]
        assert opened.job.owner == "wire:dispatcher"

        line.emit("1", Completed(run.job_id, run.lease, value=pack(3)))
        await run_pending()

        (end,) = line.received("2", Completed)
        assert (end.job_id, unpack(end.value)) == ("theirs", 3)
        assert line.received("2", AnswerChunk) == []
        # The peer can never request it again.
        assert await coordinator.store.job(run.job_id) is None

    with_a_peer(script)


def test_failed_call_is_reported_with_its_traceback() -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        line.emit("2", PeerJoined("dispatcher", cancels=True, submits_jobs=True))
        await asked(line, call("add", 1, 2))
        (run,) = line.received("1", RunJob)

        line.emit("1", Failed(run.job_id, run.lease, "Traceback: boom"))
        await run_pending()

        (end,) = line.received("2", Failed)
        assert (end.error, end.fault) == ("Traceback: boom", Fault.WORKER)

    with_a_peer(script)


@pytest.mark.parametrize(
    "work", [CallStream("add"), call("sub")], ids=["lane", "unknown"]
)
def test_unsupported_work_of_peers_is_rejected(work: Work) -> None:
    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        line.emit("2", PeerJoined("dispatcher", cancels=True, submits_jobs=True))
        await asked(line, work)

        (end,) = line.received("2", Rejected)
        assert end.job_id == "theirs"

    with_a_peer(script)


def test_peer_may_submit_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.peers.inbound_jobs.JOBS_MAX", 10)

    async def script(
        coordinator: Coordinator, there: PeerCoordinator, line: ScriptedConnection
    ) -> None:
        line.emit("2", PeerJoined("dispatcher", cancels=True, submits_jobs=True))
        for number in range(30):
            await asked(line, call("add"), str(number))

        while line.received("1", RunJob)[-1].job_id in coordinator.hub.pool.jobs:
            run = line.received("1", RunJob)
            for each in run:
                if each.job_id in coordinator.hub.pool.jobs:
                    line.emit("1", Completed(each.job_id, each.lease, value=pack(0)))
            await run_pending()

        assert len(line.received("2", Completed)) == 30
        assert line.received("2", Rejected) == []

    with_a_peer(script)
