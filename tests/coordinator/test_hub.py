"""The hub: inputs, facts, store, effects."""

import asyncio
import logging

import pytest

from coordinator.hubs import (
    CONTINUES,
    NOTHING,
    SECRET,
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
    running_coordinator,
)
from shoal.coordinator.answer_reader import UNREAD_CEILING
from shoal.coordinator.fact_recorder import RECORD_WITHIN
from shoal.coordinator.recovery import RESTART_GRACE
from shoal.domain.errors import (
    Cancelled,
    CannotDo,
    ContextExceeded,
    InvalidRequest,
    JobError,
    NoFirstOutput,
    NoWorker,
    OutputStalled,
    QueueFull,
    ShoalError,
    ShuttingDown,
    StoreError,
    TimedOut,
    TookTooLong,
    TooLarge,
    UnknownModel,
    Unprocessable,
    WorkerLost,
)
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    LateResult,
)
from shoal.domain.job import Job, TimeLimits
from shoal.domain.job_kinds import FUNCTION_KINDS
from shoal.domain.outcome import Delta, Fault, Outcome
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    Draining,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Feature, JobKind
from shoal.pool.inputs import AccountTopUp
from shoal.pool.lifecycle import JobState
from shoal.protocols.seam.session import CloseCode
from simulation import virtual

DEAF: frozenset[type] = frozenset({RunJob})  # a wire that can only run jobs
NO_CANCEL: frozenset[type] = frozenset({RunJob, Dismiss})


def kinds(facts: list[Fact]) -> list[type[Fact]]:
    return [type(fact) for fact in facts]


# From the request to the answer.


def test_job_runs_and_its_text_is_returned() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("Hello, ", "world")
        await run_pending()
        assert client.text == "Hello, world"
        assert client.outcome is None

        worker.complete()
        await run_pending()

        assert client.outcome == Outcome("Hello, world")
        assert kinds(await coordinator.history(client.job_id)) == [
            JobSubmitted,
            JobLeased,
            JobStarted,
            JobCompleted,
        ]
        assert coordinator.hub.pool.jobs == {}

    run_script(script)


def test_each_worker_receives_what_remains_of_the_total_limit() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await coordinator.join("a"), await coordinator.join("b")
        await coordinator.request(limits=TimeLimits(total=100.0))
        await asyncio.sleep(20.0)
        runner, other = (first, second) if first.runs else (second, first)
        runner.reject()
        await run_pending()

        remaining = [runner.runs[0].remaining, other.runs[0].remaining]
        assert [round(each or 0.0) for each in remaining] == [100, 80]

    run_script(script)


def test_job_waits_for_a_worker_that_just_left() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join()
        first.port.on_disconnect("restarted")
        await run_pending()
        client = await coordinator.request()
        assert client.accepted

        worker = await coordinator.join()
        worker.write("here")
        worker.complete()
        await run_pending()

        assert client.text == "here"

    run_script(script)


def test_rejected_job_goes_to_another_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await coordinator.join("a"), await coordinator.join("b")
        client = await coordinator.request()
        run = first.runs[0]

        first.emit(Rejected(run.job_id, run.lease, "loading"))
        await run_pending()
        second.write("done")
        second.complete()
        await run_pending()

        assert client.text == "done"
        assert [run.lease, second.runs[0].lease] == [1, 2]

    run_script(script)


def test_failed_job_is_not_retried() -> None:
    async def script(coordinator: Coordinator) -> None:
        first, second = await coordinator.join("a"), await coordinator.join("b")
        client = await coordinator.request()
        run = first.runs[0]

        first.emit(Failed(run.job_id, run.lease, "the prompt is too long"))
        await run_pending()

        assert isinstance(client.error, JobError)
        assert str(client.error) == "the prompt is too long"
        assert second.runs == []

    run_script(script)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.WORKER, JobError),
        (Fault.REQUEST, InvalidRequest),
        (Fault.CONTEXT, ContextExceeded),
        (Fault.SIZE, TooLarge),
        (Fault.VALUES, Unprocessable),
    ],
)
def test_failure_maps_to_the_error_of_its_fault(
    fault: Fault, error: type[ShoalError]
) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        run = worker.runs[0]

        worker.emit(Failed(run.job_id, run.lease, "too long", fault))
        await run_pending()

        assert type(client.error) is error
        assert str(client.error) == "too long"

    run_script(script)


@pytest.mark.parametrize(
    "kind", [each for each in JobKind if each not in FUNCTION_KINDS]
)
def test_every_kind_of_work_goes_to_a_capable_worker(kind: JobKind) -> None:
    async def script(coordinator: Coordinator) -> None:
        others = frozenset(JobKind) - {kind}
        other = await coordinator.join("other", kinds=others)
        worker = await coordinator.join("worker", kinds=frozenset({kind}))

        client = await coordinator.request(kind=kind)
        worker.write("done")
        worker.complete()
        await run_pending()

        assert other.runs == []
        assert worker.runs[0].work.kind is kind
        assert client.outcome == Outcome("done")

    run_script(script)


def test_unsupported_work_is_rejected_at_once() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()

        client = await coordinator.request(kind=JobKind.EMBEDDING)

        assert isinstance(client.error, CannotDo)
        assert not client.accepted

    run_script(script)


def test_draining_worker_finishes_and_gets_no_new_jobs() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2)
        client = await coordinator.request()
        worker.emit(Draining("bye"))
        await run_pending()

        other = await coordinator.request()
        worker.write("last words")
        worker.complete()
        await run_pending()

        assert client.text == "last words"
        assert len(worker.runs) == 1
        assert other.outcome is None

    run_script(script)


@pytest.mark.parametrize(
    ("models", "asked", "said"),
    [
        ([], "m", "no worker has the model m: no worker has joined yet"),
        (["llama-3"], "lama-3", "no worker has the model lama-3: did you mean llama-3"),
        (["x"], "m", "no worker has the model m: there is x"),
    ],
)
def test_unknown_model_is_rejected_with_a_hint(
    models: list[str], asked: str, said: str
) -> None:
    async def script(coordinator: Coordinator) -> None:
        for model in models:
            await coordinator.join(model=model)

        client = await coordinator.request(asked)

        assert isinstance(client.error, UnknownModel)
        assert str(client.error).startswith(said)

    run_script(script)


# Losing workers.


@pytest.mark.parametrize(
    ("features", "beginning"), [(CONTINUES, "Hello, "), (NOTHING, "")]
)
def test_other_worker_continues_after_a_loss(
    features: frozenset[Feature], beginning: str
) -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        first.write("Hello, ")
        await run_pending()
        second = await coordinator.join("b", features=features)

        first.port.on_disconnect("connection reset")
        await run_pending()
        assert second.runs[0].continues == beginning
        rest = "Hello, world"[len(beginning) :]
        second.write(*rest)
        second.complete()
        await run_pending()

        assert client.text == "Hello, world"
        assert client.outcome == Outcome("Hello, world")

    run_script(script)


def test_different_answer_after_a_loss_is_an_error_and_cancelled() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        first.write("Hello")
        await run_pending()
        first.port.on_disconnect("connection reset")
        second = await coordinator.join("b")

        second.write("Good day")
        await run_pending()

        assert isinstance(client.error, WorkerLost)
        assert client.text == "Hello"
        assert second.cancelled == [client.job_id]

    run_script(script)


def test_shorter_answer_after_a_loss_is_an_error() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        first.write("Hello")
        await run_pending()
        first.port.on_disconnect("connection reset")
        second = await coordinator.join("b")

        second.write("Hell")
        second.complete()
        await run_pending()

        assert isinstance(client.error, WorkerLost)
        assert client.outcome is None

    run_script(script)


CALL = Delta(0, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]})


def test_structured_answer_is_streamed_and_assembled() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()

        worker.write("Hm. ", CALL)
        worker.complete()
        await run_pending()

        assert client.pieces == ["Hm. ", CALL]
        assert client.outcome is not None
        (choice,) = client.outcome.choices
        assert choice.fields["content"] == "Hm. "
        assert client.outcome.text == "Hm. "
        stored = await coordinator.store.job(client.job_id)
        assert stored is not None
        assert stored.outcome == client.outcome

    run_script(script)


def test_lost_structured_answer_is_an_error() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request()
        first.write("Hm. ", CALL)
        await run_pending()
        second = await coordinator.join("b", features=CONTINUES, accepts=NO_CANCEL)

        first.port.on_disconnect("connection reset")
        await run_pending()

        assert isinstance(client.error, WorkerLost)
        assert "more than text" in str(client.error)
        # It never got the job, so its slot is free although it cannot cancel.
        assert second.commands == []
        (in_pool,) = coordinator.hub.pool.workers.values()
        assert in_pool.free_slots == 1

    run_script(script)


def test_lost_unread_answer_restarts() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        async with coordinator.hub.run_job(coordinator.job()) as reader:
            whole = asyncio.create_task(reader.outcome())
            await run_pending()
            first.write("Hm. ", CALL)
            await run_pending()
            second = await coordinator.join("b", features=CONTINUES)

            first.port.on_disconnect("connection reset")
            await run_pending()
            assert second.runs[0].continues == ""
            second.write("Something else.")
            second.complete()

            assert await whole == Outcome("Something else.")

    run_script(script)


def test_structured_work_is_never_continued() -> None:
    async def script(coordinator: Coordinator) -> None:
        can = CONTINUES | {Feature.TOOLS}
        first = await coordinator.join("a", features=can)
        messages = ({"role": "user", "content": "hi"},)
        chat = Chat(
            "m",
            messages,
            options={"tools": [{"type": "function", "function": {"name": "f"}}]},
        )
        async with coordinator.hub.run_job(
            Job(coordinator.hub.new_id(), chat)
        ) as reader:
            await run_pending()
            first.write("Let me see")
            assert await reader.read() == ["Let me see"]
            second = await coordinator.join("b", features=can)

            first.port.on_disconnect("connection reset")
            await run_pending()
            assert second.runs[0].continues == ""
            second.write("Let me see.")
            second.complete()

            assert await reader.read() == ["."]

    run_script(script)


def test_job_that_loses_three_workers_is_given_up() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join("w0")
        client = await coordinator.request()

        for number in range(1, 4):
            worker.port.on_disconnect("killed")
            worker = await coordinator.join(f"w{number}")

        assert isinstance(client.error, WorkerLost)
        assert str(client.error) == "lost 3 workers, the last one: killed"
        assert worker.runs == []

    run_script(script)


def test_newer_connection_replaces_the_older() -> None:
    async def script(coordinator: Coordinator) -> None:
        older = await coordinator.join("w")
        client = await coordinator.request()
        older.write("from the ")
        await run_pending()

        newer = await coordinator.join("w", features=CONTINUES)
        older.complete()  # it does not know yet
        older.port.on_disconnect("dismissed")
        await run_pending()
        assert client.outcome is None
        newer.write("newer")
        newer.complete()
        await run_pending()

        assert older.commands[-1] == Dismiss(
            "replaced by a newer connection", replaced=True
        )
        assert client.text == "from the newer"
        assert len(coordinator.hub.pool.workers) == 1

    run_script(script)


def test_older_connection_without_dismissal_is_disconnected() -> None:
    async def script(coordinator: Coordinator) -> None:
        older = await coordinator.join("w", accepts=DEAF)

        await coordinator.join("w", accepts=DEAF)

        ((reason, _),) = older.disconnections
        assert reason == "replaced by a newer connection"

    run_script(script)


def test_worker_that_joins_and_leaves_at_once_leaves_no_state() -> None:
    async def script(coordinator: Coordinator) -> None:
        for _ in range(5):
            member = ScriptedWorker(coordinator.hub, "w")
            member.port.on_disconnect("flapping")
        await run_pending()
        last = await coordinator.join("w")
        client = await coordinator.request()

        assert list(coordinator.hub.pool.workers) == ["wire:w"]
        assert [run.job_id for run in last.runs] == [client.job_id]

    run_script(script)


def test_result_of_an_ended_lease_is_recorded_and_not_delivered() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(accepts=NO_CANCEL)
        limits = TimeLimits(first_output=5.0)
        client = await coordinator.request(limits=limits)
        await asyncio.sleep(6.0)
        assert isinstance(client.error, TimedOut)

        worker.write("too late")
        worker.complete()
        await run_pending()

        story = await coordinator.history(client.job_id)
        assert isinstance(story[-1], LateResult)
        assert client.text == ""
        stored = await coordinator.store.job(client.job_id)
        assert stored is not None
        assert (stored.state, stored.outcome) == (JobState.EXPIRED, None)

    run_script(script)


# Facts are stored before their effects.


def test_job_is_accepted_and_leased_after_it_is_stored() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        coordinator.store.writable.clear()
        client = await coordinator.request()
        await asyncio.sleep(20.0)
        assert not client.accepted
        assert worker.commands == []

        coordinator.store.writable.set()
        await run_pending()

        assert client.accepted
        assert len(worker.runs) == 1

    run_script(script)


def test_end_is_not_delivered_before_it_is_stored() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("all of it")
        await run_pending()
        coordinator.store.writable.clear()

        worker.complete()
        await asyncio.sleep(20.0)
        assert client.text == "all of it"
        assert client.outcome is None
        coordinator.store.writable.set()
        await run_pending()

        assert client.outcome == Outcome("all of it")

    run_script(script)


def test_text_does_not_wait_for_the_store() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        coordinator.store.writable.clear()

        worker.write("a", "b", "c")
        await run_pending()

        assert client.text == "abc"
        coordinator.store.writable.set()

    run_script(script)


def test_start_of_a_job_is_stored_soon() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("a")
        await run_pending()
        before = kinds(await coordinator.history(client.job_id))

        await asyncio.sleep(2 * RECORD_WITHIN)

        assert JobStarted not in before
        assert kinds(await coordinator.history(client.job_id)) == [*before, JobStarted]

    run_script(script)


def test_decision_for_a_lost_worker_applies_to_its_successor() -> None:
    async def script(coordinator: Coordinator) -> None:
        older = await coordinator.join("w")
        coordinator.store.writable.clear()
        client = await coordinator.request()  # its lease is being stored
        older.port.on_disconnect("connection reset")
        newer = ScriptedWorker(coordinator.hub, "w")

        coordinator.store.writable.set()
        await run_pending()
        newer.write("here")
        newer.complete()
        await run_pending()

        assert client.text == "here"
        assert [run.lease for run in newer.runs] == [2]

    run_script(script)


# Limits of the queue and of time.


def test_burst_beyond_slots_and_queue_is_rejected() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2)

        clients = [Client(coordinator.hub, coordinator.job()) for _ in range(7)]
        await run_pending()

        refused = [isinstance(client.error, QueueFull) for client in clients]
        assert refused == [False] * 5 + [True] * 2
        assert len(worker.runs) == 2
        assert len(await coordinator.store.open_jobs()) == 5
        worker.complete(run=0)
        await run_pending()
        assert (await coordinator.request()).accepted

    run_script(script, queue_max=3)


def test_rejected_jobs_leave_no_state() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        for _ in range(3):
            await coordinator.request()

        refused = await coordinator.request()
        await run_pending()

        assert isinstance(refused.error, QueueFull)
        assert str(refused.error) == "2 jobs are waiting already"
        assert (
            len(await coordinator.store.open_jobs())
            == len(coordinator.hub.pool.jobs)
            == 3
        )

    run_script(script, queue_max=2)


FOUR = TimeLimits(queue=10.0, first_output=20.0, silence=5.0, total=60.0)


def test_expired_job_lists_the_reasons() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        await coordinator.request()
        client = await coordinator.request(limits=FOUR)
        await asyncio.sleep(9.0)
        assert client.error is None

        await asyncio.sleep(2.0)

        assert isinstance(client.error, NoWorker)
        assert "all slots busy (1)" in str(client.error)

    run_script(script)


def test_worker_without_first_output_is_cancelled() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request(limits=FOUR)
        await asyncio.sleep(19.0)
        assert client.error is None

        await asyncio.sleep(2.0)

        assert isinstance(client.error, NoFirstOutput)
        assert worker.cancelled == [client.job_id]

    run_script(script)


def test_silence_is_limited_and_each_text_resets_it() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request(limits=FOUR)
        for _ in range(4):
            worker.write("x")
            await asyncio.sleep(4.5)
        assert client.error is None

        await asyncio.sleep(1.0)

        assert isinstance(client.error, OutputStalled)
        assert "waiting for more output" in str(client.error)

    run_script(script)


def test_endless_answer_is_cut_at_the_total_limit() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request(limits=FOUR)
        for _ in range(61):
            worker.write("x")
            await asyncio.sleep(1.0)

        assert isinstance(client.error, TookTooLong)
        assert "running in all" in str(client.error)
        assert worker.cancelled == [client.job_id]

    run_script(script)


def test_silence_limit_restarts_for_the_next_worker() -> None:
    async def script(coordinator: Coordinator) -> None:
        first = await coordinator.join("a")
        client = await coordinator.request(limits=FOUR)
        first.write("Hello, ")
        second = await coordinator.join("b", features=CONTINUES)
        await asyncio.sleep(4.5)
        coordinator.store.writable.clear()
        first.port.on_disconnect("connection reset")  # and the commit is slow
        await asyncio.sleep(1.0)
        coordinator.store.writable.set()
        await run_pending()

        assert client.error is None
        second.write("world")
        second.complete()
        await run_pending()

        assert client.text == "Hello, world"

    run_script(script)


def test_slow_reader_is_disconnected_and_the_others_continue() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        quick = await coordinator.request()
        with coordinator.hub.observe_job(quick.job_id) as slow:
            assert slow is not None
            for _ in range(9):
                worker.write("x" * (UNREAD_CEILING // 8))
                await run_pending()
            with pytest.raises(Cancelled, match="reads too slowly"):
                await slow.outcome()
        worker.complete()
        await run_pending()

        assert len(quick.text) == 9 * (UNREAD_CEILING // 8)
        assert quick.outcome is not None
        assert worker.cancelled == []

    run_script(script)


def test_onlooker_reads_everything_and_keeps_no_job_running() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("Hello, ")
        await run_pending()

        with coordinator.hub.observe_job(client.job_id) as reader:
            assert reader is not None
            assert await reader.read() == ["Hello, "]
            await client.disconnect()
            with pytest.raises(Cancelled, match="the client left"):
                await reader.outcome()

        assert worker.cancelled == [client.job_id]
        with coordinator.hub.observe_job(client.job_id) as reader:
            assert reader is None

    run_script(script)


def test_client_that_does_not_read_is_disconnected() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        async with coordinator.hub.run_job(coordinator.job()) as reader:
            await run_pending()
            run = worker.runs[0]
            piece = "x" * (UNREAD_CEILING // 8)
            for _ in range(9):
                worker.emit(AnswerChunk(run.job_id, run.lease, [piece]))
            await run_pending()

            with pytest.raises(Cancelled, match="reads too slowly"):
                await reader.outcome()

        assert worker.cancelled == [run.job_id]

    run_script(script)


# Clients that disconnect.


@pytest.mark.parametrize("when", ["leased", "streaming"])
def test_client_disconnect_frees_its_worker(when: str) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        if when == "streaming":
            worker.write("some text")
            await run_pending()

        await client.disconnect()

        lease = worker.runs[0].lease
        assert worker.commands[-1] == CancelJob(client.job_id, lease)
        assert isinstance((await coordinator.history(client.job_id))[-1], JobCancelled)
        (in_pool,) = coordinator.hub.pool.workers.values()
        assert in_pool.free_slots == 1

    run_script(script)


def test_disconnected_client_leaves_the_queue() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        first, second = await coordinator.request(), await coordinator.request()

        await second.disconnect()
        worker.complete()
        await run_pending()

        assert first.outcome is not None
        assert len(worker.runs) == 1
        assert await coordinator.store.open_jobs() == []

    run_script(script)


def test_client_that_disconnects_before_acceptance_is_never_served() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        coordinator.store.writable.clear()
        client = await coordinator.request()

        await client.disconnect()
        coordinator.store.writable.set()
        await run_pending()

        # The lease may be in a commit by then, but only together with its end.
        assert [run.job_id for run in worker.runs] == worker.cancelled
        assert await coordinator.store.open_jobs() == []
        assert coordinator.hub.pool.jobs == {}

    run_script(script)


def test_immediate_disconnect_leaves_no_state() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = Client(coordinator.hub, coordinator.job())
        await asyncio.sleep(0)

        client.task.cancel()
        await run_pending()

        assert [run.job_id for run in worker.runs] == worker.cancelled
        assert coordinator.hub.pool.jobs == {}

    run_script(script)


def test_slot_stays_busy_without_cancellation() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(accepts=NO_CANCEL)
        client = await coordinator.request()
        await client.disconnect()
        waiting = await coordinator.request()
        assert len(worker.runs) == 1

        worker.emit(Completed(worker.runs[0].job_id, worker.runs[0].lease))
        await run_pending()
        worker.write("now you")
        worker.complete()
        await run_pending()

        assert waiting.text == "now you"

    run_script(script)


def test_operator_can_cancel_open_jobs_only() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()

        assert coordinator.hub.cancel(client.job_id, "cancelled by an operator")
        await run_pending()

        assert isinstance(client.error, Cancelled)
        assert worker.cancelled == [client.job_id]
        assert not coordinator.hub.cancel(client.job_id, "again")

    run_script(script)


def test_all_jobs_of_an_owner_can_be_cancelled() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        running = await coordinator.request(owner="al")
        waiting = await coordinator.request(owner="al", key="k")
        other = await coordinator.request(owner="bo")

        assert coordinator.hub.cancel_all_of("al", "the key was revoked") == 2
        await run_pending()
        worker.write("for bo")
        worker.complete()
        await run_pending()

        for client in (running, waiting):
            assert isinstance(client.error, Cancelled)
            assert str(client.error) == "the key was revoked"
        assert worker.cancelled == [running.job_id]
        assert other.text == "for bo"
        assert coordinator.hub.cancel_all_of("al", "again") == 0

    run_script(script)


def test_disconnect_during_a_burst_leaks_no_slot() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join(slots=2, accepts=NO_CANCEL)

        # During a commit, three clients submit: the third finds the queue
        # full, so the first two are leased.  At the same time the first
        # disconnects, and its worker cannot cancel.
        coordinator.store.writable.clear()
        await coordinator.join("another", "another model")
        clients = [Client(coordinator.hub, coordinator.job()) for _ in range(3)]
        await run_pending()
        clients[0].task.cancel()
        await run_pending()
        coordinator.store.writable.set()
        await run_pending()
        assert len(worker.runs) == 2
        for run in (0, 1):
            worker.complete(run=run)
        await run_pending()
        worker.complete()
        await run_pending()

        assert all(not each.leases for each in coordinator.hub.pool.workers.values())
        assert [client.outcome is not None for client in clients[1:]] == [True, True]

    run_script(script, queue_max=2)


# A store that fails.


def test_store_failure_ends_every_job_with_its_error() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        streaming = await coordinator.request()
        worker.write("some")
        await run_pending()
        waiting = await coordinator.request()
        coordinator.store.full = True

        submitting = await coordinator.request()
        await run_pending()

        for client in (streaming, waiting, submitting):
            assert isinstance(client.error, StoreError), client.error
        assert not submitting.accepted
        assert len(worker.runs) == 1
        assert coordinator.task.done()
        assert coordinator.hub.unavailable_reason == "shoal.db: disk I/O error"
        assert isinstance((await coordinator.request()).error, StoreError)

    run_script(script)


def test_disconnect_before_a_store_failure_affects_no_others() -> None:
    async def script(coordinator: Coordinator) -> None:
        coordinator.store.writable.clear()
        leaving = asyncio.create_task(
            coordinator.hub.process(AccountTopUp("a", 1, "admin"))
        )
        staying = asyncio.create_task(
            coordinator.hub.process(AccountTopUp("b", 1, "admin"))
        )
        await run_pending()
        leaving.cancel()
        coordinator.store.full = True

        coordinator.store.writable.set()
        await run_pending()

        with pytest.raises(StoreError):
            await staying
        assert leaving.cancelled()
        assert coordinator.task.done()
        assert coordinator.hub.unavailable_reason == "shoal.db: disk I/O error"

    run_script(script)


def test_events_after_a_store_failure_are_harmless() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        await coordinator.request()
        coordinator.store.full = True
        await coordinator.request()

        worker.write("text")
        worker.complete()
        worker.port.on_disconnect("connection reset")
        late = await coordinator.join("other")
        await asyncio.sleep(10_000.0)

        assert late.commands == []

    run_script(script)


def test_coordinator_stops_after_a_store_failure() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        await coordinator.request()
        coordinator.store.full = True
        await coordinator.request()

        async with asyncio.timeout(1.0):
            await coordinator.hub.drain()

    run_script(script)


# Start and stop.


def test_open_jobs_resume_after_a_restart(store: SlowStore) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            worker = await coordinator.join()
            begun, queued = await coordinator.request(), await coordinator.request()
            worker.write("lost")
            await run_pending()

        async with running_coordinator(store) as coordinator:
            await asyncio.sleep(RESTART_GRACE)  # longer than the default queue limit
            worker = await coordinator.join(slots=2)
            assert [(run.job_id, run.lease) for run in worker.runs] == [
                (begun.job_id, 2),
                (queued.job_id, 1),
            ]
            for run in (0, 1):
                worker.write("anew", run=run)
                worker.complete(run=run)
            await run_pending()

            story = await coordinator.history(begun.job_id)

        assert [JobRequeued, JobLeased, JobStarted, JobCompleted] == kinds(story)[-4:]
        for client in (begun, queued):
            stored = await store.job(client.job_id)
            assert stored is not None
            assert stored.outcome == Outcome("anew")

    virtual.run(scenario())


def test_models_from_before_a_restart_are_awaited(store: SlowStore) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            await coordinator.join(model="m")

        async with running_coordinator(store) as coordinator:
            client = await coordinator.request("m")
            unknown = await coordinator.request("never heard of")
            worker = await coordinator.join(model="m")
            worker.write("back")
            worker.complete()
            await client.task

            assert client.text == "back"
            assert isinstance(unknown.error, UnknownModel)

    virtual.run(scenario())


def test_result_for_the_previous_coordinator_is_late(
    store: SlowStore,
) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            worker = await coordinator.join()
            client = await coordinator.request()
            old = worker.runs[0]

        async with running_coordinator(store) as coordinator:
            worker = await coordinator.join()
            worker.emit(Completed(old.job_id, old.lease))
            await run_pending()
            stored = await store.job(client.job_id)
            assert stored is not None
            assert stored.state is JobState.LEASED

            worker.complete()
            await run_pending()

            story = await coordinator.history(client.job_id)
            assert [LateResult, JobCompleted] == kinds(story)[-2:]

    virtual.run(scenario())


def test_job_without_a_worker_after_a_restart_expires(store: SlowStore) -> None:
    async def scenario() -> None:
        async with running_coordinator(store) as coordinator:
            await coordinator.join()
            await coordinator.request(limits=FOUR)
        async with running_coordinator(store) as coordinator:
            await asyncio.sleep(RESTART_GRACE + FOUR.queue + 1.0)

            assert coordinator.hub.pool.jobs == {}
        assert await store.open_jobs() == []

    virtual.run(scenario())


def test_drain_finishes_open_jobs_and_rejects_new_ones() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()

        draining = asyncio.create_task(coordinator.hub.drain())
        await run_pending()
        refused = await coordinator.request()
        assert isinstance(refused.error, ShuttingDown)
        assert coordinator.hub.unavailable_reason == "stopping"
        assert not draining.done()
        worker.complete()
        await draining

        assert client.outcome is not None

    run_script(script)


def test_drain_waits_for_a_job_in_acceptance() -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        coordinator.store.writable.clear()
        client = await coordinator.request()

        draining = asyncio.create_task(coordinator.hub.drain())
        await run_pending()
        assert not draining.done()
        coordinator.store.writable.set()
        await run_pending()
        assert not draining.done()
        worker.complete()
        await draining

        assert client.outcome is not None

    run_script(script)


def test_drain_without_open_jobs_completes_at_once() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        refused = await coordinator.request("unknown")
        assert isinstance(refused.error, UnknownModel)

        async with asyncio.timeout(1.0):
            await coordinator.hub.drain()

    run_script(script)


def test_drain_after_a_rejection_completes_at_once() -> None:
    async def script(coordinator: Coordinator) -> None:
        await coordinator.join()
        assert isinstance((await coordinator.request()).error, QueueFull)

        async with asyncio.timeout(1.0):
            await coordinator.hub.drain()

    run_script(script, queue_max=0)


def test_stop_disconnects_all_workers() -> None:
    async def script(coordinator: Coordinator) -> None:
        workers = [await coordinator.join(name) for name in "abc"]

        coordinator.hub.disconnect_all("the coordinator is stopping")

        for worker in workers:
            assert worker.disconnections == [
                ("the coordinator is stopping", CloseCode.GOING_AWAY)
            ]

    run_script(script)


def test_log_has_every_fact_and_no_prompt_or_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(coordinator: Coordinator) -> None:
        worker = await coordinator.join()
        client = await coordinator.request()
        worker.write("a private answer")
        worker.complete()
        await run_pending()
        assert client.outcome is not None

    with caplog.at_level(logging.DEBUG):
        run_script(script)

    lines = [record.getMessage() for record in caplog.records]
    for fact in ("WorkerJoined", "JobSubmitted", "JobLeased", "JobCompleted"):
        assert sum(f"fact={fact}" in line for line in lines) == 1
    assert not any(SECRET in line or "private" in line for line in lines)
