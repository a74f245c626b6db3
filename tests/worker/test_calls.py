"""A worker's calls and call streams, with real processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    BlobMissing,
    CallProgress,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Event,
    Failed,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import JSON, Call, CallStream, Task, Work
from shoal.protocols.seam.session import WorkerEnd
from shoal.tasks.process_pool import ProcessPool
from shoal.tasks.values import NO_KWARGS, Ref, ValueReader, pack
from shoal.training.launch import MEMBER_CALL
from shoal.transports.clock import LoopClock
from shoal.worker import blob_cache
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend
from tasks import demo_tasks
from tasks.callers import DEMO, TYPED, Gate, call, code_call, gate, importable
from worker.test_agent import ALL, Network

__all__ = ["gate", "importable"]

ONE = LeaseNumber(1)
DIGEST = b"d" * 32
E = TypeVar("E", bound=Event)


class SentEvents(list[Event]):
    """The events that a worker has sent, which tests await."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def append(self, event: Event) -> None:
        super().append(event)
        self.changed.set()

    async def next(self, kind: type[E]) -> E:
        """Wait for the first event of a kind, and remove it."""
        while True:
            for number, each in enumerate(self):
                if isinstance(each, kind):
                    del self[number]
                    return each
            self.changed.clear()
            await self.changed.wait()


@dataclass
class Dialled(Network):
    """Signals when the worker is connected."""

    connected: asyncio.Event = field(default_factory=asyncio.Event)

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        self.connected.set()
        return super().start_session(headers)


@dataclass
class Stage:
    """A worker with tasks, and its coordinator."""

    network: Dialled
    sent: SentEvents
    agent: Agent
    running: asyncio.Task[str]
    reports: list[WorkerEvent] = field(default_factory=list)

    def run(self, work: Work, name: str = "j", lease: LeaseNumber = ONE) -> None:
        self.network.receive(RunJob(JobId(name), lease, work))

    def push(self, *calls: tuple[object, ...], name: str = "j") -> None:
        pushed = [
            StreamedCall(number, pack([*args]).data, NO_KWARGS)
            for number, args in enumerate(calls)
        ]
        self.network.receive(PushCalls(JobId(name), ONE, pushed))


ACCEPTS = ALL | {CallProgress, CallsReturned, BlobMissing, Rejected}


@asynccontextmanager
async def stage(
    accepts: frozenset[type] = ACCEPTS,
    slots: int = 1,
    *,
    modules: Sequence[str] = (DEMO,),
    trust_code: bool = False,
) -> AsyncIterator[Stage]:
    sent, reports = SentEvents(), list[WorkerEvent]()
    network = Dialled(sent=sent, accepts=accepts)
    caller = ProcessPool(modules, slots, trust_code=trust_code)
    blobs = BlobCache()
    try:
        await caller.start()
        agent = Agent(
            network,
            network.dial,
            lambda work: None,
            LoopClock(),
            Random(1),
            reports.append,
            functions=FunctionBackend(caller, blobs),
        )
        running = asyncio.create_task(agent.run())
        await network.connected.wait()
        yield Stage(network, sent, agent, running, reports)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await caller.close()
        await blobs.close()


async def test_value_of_a_call_completes_it() -> None:
    async with stage() as its:
        its.run(call("demo.add", 20, 22))
        done = await its.sent.next(Completed)

    assert (done.job_id, done.lease) == ("j", 1)
    assert ValueReader().read(done.value) == 42


async def test_call_that_raises_fails_with_its_traceback() -> None:
    async with stage() as its:
        its.run(call("demo.fail", "zap"))
        failed = await its.sent.next(Failed)

    assert failed.fault is Fault.WORKER
    assert failed.error.endswith("ValueError: zap")


async def test_unknown_function_is_rejected_for_another_worker() -> None:
    async with stage() as its:
        its.run(call("demo.nope"))
        rejected = await its.sent.next(Rejected)
        its.run(CallStream("demo.nope"))
        other = await its.sent.next(Rejected)

    assert "Task 'demo.nope' not registered" in rejected.reason
    assert other.reason == rejected.reason


async def test_code_is_rejected_with_a_hint() -> None:
    async with stage() as its:
        its.run(code_call(len, [1]))
        failed = await its.sent.next(Failed)

    assert failed.fault is Fault.REQUEST
    assert "--trust-code" in failed.error


async def test_work_for_models_is_not_accepted() -> None:
    async with stage() as its:
        its.run(Task("summarize", {"input": "x"}))
        rejected = await its.sent.next(Rejected)

    assert "does not offer the task 'summarize'" in rejected.reason


async def test_task_in_json_is_answered_in_json() -> None:
    payloads: list[tuple[dict[str, JSON], str]] = [
        ({"task_type": "demo.add", "args": [1, 2]}, "3"),
        ({"job_type": "TASK", "task_type": "demo.add", "x": 1, "y": 3}, "4"),
        ({"task_type": "demo.add", "args": [1], "kwargs": {"y": 5}}, "6"),
        ({"name": "demo.add", "x": 1, "y": 2.5}, "3.5"),
    ]
    async with stage() as its:
        for number, (payload, text) in enumerate(payloads):
            its.run(Task("demo.add", payload), f"j{number}")
            done = await its.sent.next(Completed)

            assert done.rest == (text,), payload


async def test_result_without_json_form_fails() -> None:
    tasks = [
        (Task("ones", {"args": [3]}), "a ndarray has no JSON form"),
        (Task("demo.bytes"), "a bytes has no JSON form"),
        (Task("demo.add", {"args": "12"}), "args: expected a list"),
        (Task("demo.add", {"kwargs": [1]}), "kwargs: expected a map"),
    ]
    async with stage(modules=(DEMO, TYPED)) as its:
        for number, (task, sent) in enumerate(tasks):
            its.run(task, f"j{number}")
            failed = await its.sent.next(Failed)

            assert failed.fault is Fault.REQUEST
            assert sent in failed.error


async def test_progress_is_sent_on_wires_that_carry_it() -> None:
    async with stage() as its:
        its.run(call("steps", 3))
        first = await its.sent.next(CallProgress)
        await its.sent.next(Completed)
    async with stage(ACCEPTS - {CallProgress}) as other:
        other.run(call("steps", 3))
        await other.sent.next(Completed)

        assert not any(isinstance(each, CallProgress) for each in other.sent)

    assert (first.share, first.remark) == (0.0, "step 0")


async def test_cancelled_call_reports_nothing_more(gate: Gate) -> None:
    async with stage() as its:
        its.run(call("waits", *gate.args))
        await gate.reached()
        its.network.receive(CancelJob(JobId("j"), ONE))
        its.run(call("demo.add", 1), "k")
        done = await its.sent.next(Completed)

    assert done.job_id == "k"
    assert its.sent == []


async def test_lost_connection_stops_calls_and_streams(gate: Gate) -> None:
    async with stage() as its:
        its.run(call("waits", *gate.args))
        await gate.reached()
        its.network.connected.clear()
        its.network.links[-1].cut()
        await its.network.connected.wait()
        its.run(call("demo.add", 1), "k")
        done = await its.sent.next(Completed)

    assert done.job_id == "k"


def member(gate: Gate, rank: int = 0) -> Call:
    """Return a member of a training run that waits at a gate."""
    sent = code_call(demo_tasks.waits, *gate.args)
    return replace(sent, name=MEMBER_CALL, timeout=1000.0 + rank)


async def reconnect(its: Stage) -> None:
    its.network.connected.clear()
    its.network.links[-1].cut()
    await its.network.connected.wait()


async def test_member_of_a_run_outlives_its_connection(gate: Gate) -> None:
    async with stage(trust_code=True) as its:
        its.run(member(gate))
        await gate.reached()
        await reconnect(its)
        its.run(member(gate), "again", LeaseNumber(2))
        await gate.open()
        done = await its.sent.next(Completed)

    assert (done.job_id, done.lease) == ("again", 2)


async def test_end_of_a_member_waits_for_its_command(gate: Gate) -> None:
    async with stage(trust_code=True) as its:
        its.run(member(gate))
        await gate.reached()
        await reconnect(its)
        await gate.open()
        its.run(call("demo.add", 1), "other")
        assert (await its.sent.next(Completed)).job_id == "other"
        its.run(member(gate), "again")
        done = await its.sent.next(Completed)

    assert done.job_id == "again"


async def test_result_of_a_member_is_sent_again_when_it_was_lost() -> None:
    """Its coordinator closes the connection before it has read the result."""
    once = replace(code_call(time.monotonic_ns), name=MEMBER_CALL)
    async with stage(trust_code=True) as its:
        its.run(once)
        lost = await its.sent.next(Completed)
        await reconnect(its)
        its.run(once, "again", LeaseNumber(2))
        done = await its.sent.next(Completed)

    assert (done.job_id, done.lease) == ("again", 2)
    assert done.value == lost.value


async def test_member_that_was_rejected_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it lacked may be there."""
    lacks = replace(code_call(np.sum, Ref(DIGEST)), name=MEMBER_CALL)
    async with stage(trust_code=True) as its:
        with monkeypatch.context() as brief:
            brief.setattr(blob_cache, "BLOB_TIMEOUT", 0.0)
            its.run(lacks)
            rejected = await its.sent.next(Rejected)
        its.network.receive(SendBlob(DIGEST, pack(np.ones(100_000)).data))
        its.run(lacks, "again")
        done = await its.sent.next(Completed)

    assert "did not arrive" in rejected.reason
    assert done.job_id == "again"


async def test_worker_runs_one_member_of_a_run(gate: Gate) -> None:
    async with stage(slots=2, trust_code=True) as its:
        its.run(member(gate, 0))
        await gate.reached()
        await reconnect(its)
        its.run(member(gate, 1), "other")
        rejected = await its.sent.next(Rejected)
        its.run(member(gate, 0), "again")
        await gate.open()
        done = await its.sent.next(Completed)

    assert rejected.job_id == "other"
    assert "another member" in rejected.reason
    assert done.job_id == "again"


async def test_cancelled_member_ends(gate: Gate) -> None:
    async with stage(trust_code=True) as its:
        its.run(member(gate))
        await gate.reached()
        await reconnect(its)
        its.run(member(gate), "again")
        its.network.receive(CancelJob(JobId("again"), ONE))
        its.run(call("demo.add", 1), "k")
        done = await its.sent.next(Completed)

    assert done.job_id == "k"
    assert its.sent == []


async def test_stream_returns_pushed_calls_until_closed() -> None:
    async with stage() as its:
        its.run(CallStream("demo.add"))
        its.push((1, 2), (3, 4))
        returns = (await its.sent.next(CallsReturned)).results
        while len(returns) < 2:
            returns += (await its.sent.next(CallsReturned)).results
        its.run(CallStream("demo.add"), "other")
        rejected = await its.sent.next(Rejected)
        its.network.receive(CancelJob(JobId("j"), ONE))
        its.run(CallStream("demo.add"), "k")
        its.push((5, 6), name="k")
        last = await its.sent.next(CallsReturned)

    assert [ValueReader().read(each.value) for each in returns] == [3, 7]
    assert rejected.reason == "all 1 slots are taken"
    assert last.job_id == "k"


async def test_recalled_calls_do_not_return(gate: Gate) -> None:
    async with stage() as its:
        its.run(CallStream("either"))
        its.push(gate.args, ("/dev/null",))
        await gate.reached()
        its.network.receive(CancelCalls(JobId("j"), ONE, (0,)))
        returned = await its.sent.next(CallsReturned)

    assert [each.number for each in returned.results] == [1]


async def test_sent_large_argument_is_available() -> None:
    async with stage(modules=[TYPED]) as its:
        its.network.receive(SendBlob(DIGEST, pack(np.ones(100_000)).data))
        its.run(call("total", Ref(DIGEST)))
        done = await its.sent.next(Completed)

    assert ValueReader().read(done.value) == 100_000.0


async def test_missing_large_argument_is_requested_once() -> None:
    async with stage(modules=[TYPED], slots=2) as its:
        its.run(call("total", Ref(DIGEST)), "one")
        its.run(call("total", Ref(DIGEST)), "two")
        lacked = await its.sent.next(BlobMissing)
        its.network.receive(SendBlob(DIGEST, pack(np.ones(100_000)).data))
        await its.sent.next(Completed)
        await its.sent.next(Completed)

    assert lacked.digest == DIGEST
    assert its.sent == []


async def test_leaving_worker_finishes_its_call_and_closes_streams(
    gate: Gate,
) -> None:
    async with stage(slots=2) as its:
        its.run(CallStream("demo.add"), "lane")
        its.push((1, 2), name="lane")
        await its.sent.next(CallsReturned)
        its.run(call("waits", *gate.args))
        await gate.reached()
        its.agent.leave()
        assert not its.running.done()
        await gate.open()
        await its.sent.next(Completed)

        assert await its.running == "stopped here"


async def test_calls_without_a_connection_do_not_delay_leaving() -> None:
    async with stage() as its:
        its.run(Call("demo.add", b"\x92\x01\x02", b"\x80", 0))
        failed = await its.sent.next(Failed)

    assert failed.error == "Task timed out after 0s"
