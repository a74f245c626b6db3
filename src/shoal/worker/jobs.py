"""Runs a coordinator's inference jobs in the slots of engines."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain import errors
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.trace_context import read_traceparent
from shoal.domain.work import JSON, Chat, Work, describe_target
from shoal.engines.engine import TRACEPARENT, Finished, Item, Progress, WorkRunner
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.traces import JobTracer

DROPPED_SHARE = 4  # a quarter of the messages at a time: few attempts, little lost


async def run_trimmed(
    runner: WorkRunner, work: Work, continues: str = "", thoughts: str = ""
) -> AsyncGenerator[Item | Progress, None]:
    """Run ``work`` as ``runner`` does; shorten a chat that is too long.

    Raises ContextExceeded if even the last message is too long.
    """
    begun = False
    while True:
        try:
            async with aclosing(runner.run(work, continues, thoughts)) as items:
                async for item in items:
                    begun = True
                    yield item
            return
        except errors.ContextExceeded:
            shorter = trimmed(work) if isinstance(work, Chat) else None
            if shorter is None or begun:
                raise
            work = shorter


def trimmed(chat: Chat) -> Chat | None:
    """Return a shorter chat; None if nothing can be left out.

    The oldest messages go, except for the system's and the last.  An answer without its
    question goes as well: many models refuse to begin with one.
    """
    system = [each for each in chat.messages if _is_system(each)]
    others = [each for each in chat.messages if not _is_system(each)]
    if len(others) < 2:
        return None
    kept = others[max(1, len(others) // DROPPED_SHARE) :]
    while len(kept) > 1 and kept[0].get("role") == "assistant":
        del kept[0]
    return replace(chat, messages=(*system, *kept))


def _is_system(message: Mapping[str, JSON]) -> bool:
    return message.get("role") == "system"


class EngineSlots:
    """The slots of an engine, shared by its agents, each of which offers all of them.

    A block ``async with`` the slots holds one of them; those that wait longest come
    first.  ``total`` counts all slots, and ``size`` the concurrent jobs for which the
    owner lends some.  ``jobs`` counts the jobs of all agents, including those that wait
    for a slot.  ``chosen`` is how many the owner wants, whatever the engine has; 0: as
    many as that.  ``engine`` names for coordinators the offers that share them, as in
    ``Offer``.
    """

    def __init__(
        self,
        total: int,
        throttle: OwnerThrottle | None = None,
        chosen: int = 0,
        engine: str = "",
    ) -> None:
        self.engine = engine
        self._chosen = chosen
        self.total = chosen or total
        self.jobs = 0
        self.idle: asyncio.Event | None = None  # to be set when there is no job
        self._throttle = throttle or OwnerThrottle()
        self._throttle.listen(self._update)
        self._extra = 0
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._update()

    async def wait_idle(self) -> None:
        """Wait until all jobs have ended."""
        while self.jobs:
            self.idle = self.idle or asyncio.Event()
            await self.idle.wait()

    def resize(self, total: int) -> None:
        """Set how many slots there are; jobs beyond them run to their ends."""
        self.total = self._chosen or total
        self._update()

    def set_extra(self, extra: int) -> None:
        """Set how many more jobs may run, beside those that only wait for others."""
        self._extra = extra
        self._update()

    def _update(self) -> None:
        self.size = self._throttle.lent(self.total) + self._extra
        self._grant()

    async def __aenter__(self) -> None:
        if self._taken < self.size:  # nothing waits then
            self._taken += 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._release()  # granted and cancelled at the same time
            elif granted in self._waiting:
                self._waiting.remove(granted)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        self._taken -= 1
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        """Give the free slots to those that wait for one."""
        while self._waiting and self._taken < self.size:
            granted = self._waiting.popleft()
            if not granted.cancelled():
                self._taken += 1
                granted.set_result(None)

    def busy_with_others(self, own: int) -> bool:
        """Return whether all slots are busy, and not only with an agent's ``own`` jobs.

        A coordinator may not know: by itself it counts the jobs of each model.
        """
        return own < self.size <= self.jobs


def _ignore() -> None:
    """Do nothing."""


@dataclass(slots=True, eq=False)
class ModelBackend:
    """One of an engine's models, for the jobs of one coordinator.

    ``on_unavailable`` is called when the engine refuses a job.  ``jobs`` counts the
    coordinator's jobs, including those that wait for a slot.
    """

    runner: WorkRunner
    slots: EngineSlots
    on_unavailable: Callable[[], None] = _ignore
    jobs: int = 0

    @property
    def free_slots(self) -> int:
        """The number of free slots of the engine."""
        return self.slots.size - self.slots.jobs


FindModel: TypeAlias = Callable[[Work], ModelBackend | None]
"""Finds the model for work; None: this worker has none."""


def only_model(
    runner: WorkRunner, slots: EngineSlots, on_unavailable: Callable[[], None] = _ignore
) -> FindModel:
    """Return a finder for wires that carry one model."""
    backend = ModelBackend(runner, slots, on_unavailable)
    return lambda work: backend


def failure_event(
    job_id: JobId,
    lease: LeaseNumber,
    error: errors.Unavailable | errors.NotFound | errors.ClientError | errors.JobError,
) -> words.Rejected | words.Failed:
    """Return the event that reports why a job did not complete.

    Another worker may do what this one rejects, or its engine failed at.
    """
    match error:
        case errors.EngineFailed():
            return words.Failed(job_id, lease, str(error), Fault.ENGINE)
        case errors.Unavailable() | errors.NotFound():
            return words.Rejected(job_id, lease, str(error))
        case errors.ContextExceeded():
            return words.Failed(job_id, lease, str(error), Fault.CONTEXT)
        case errors.TooLarge():
            return words.Failed(job_id, lease, str(error), Fault.SIZE)
        case errors.Unprocessable():
            return words.Failed(job_id, lease, str(error), Fault.VALUES)
        case errors.ClientError():
            return words.Failed(job_id, lease, str(error), Fault.REQUEST)
        case errors.JobError():
            return words.Failed(job_id, lease, str(error), exception=error.exception)


BACKLOG_MAX = 256  # jobs that may wait for a slot
AWAY = "the coordinator is away"
"""The message of a cancellation for a lost connection."""

log = logging.getLogger("shoal.worker")


@dataclass(slots=True, eq=False)
class RunningJobs:
    """Runs jobs, and reports their answers.

    Args:
        find: finds the model for a job.
        send: sends an event once a connection has room for it.
        on_ended: called when a job has ended.
        tasks: the task group of the jobs.
        traces: makes spans of traced jobs; None: their engines continue the
            coordinator's.
    """

    _find: FindModel
    _send: Callable[[words.Event], Awaitable[None]]
    _on_ended: Callable[[], None]
    _tasks: asyncio.TaskGroup
    _traces: JobTracer | None = None
    _running: dict[JobId, asyncio.Task[None]] = field(default_factory=dict)
    _returnable: dict[JobId, LeaseNumber] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._running

    def start(self, command: words.RunJob, *, can_refuse: bool) -> str | None:
        """Start a job, or return why it is rejected.

        ``can_refuse`` says whether the wire supports rejection; without it, jobs wait
        for a slot.
        """
        backend = self._find(command.work)
        if backend is None:
            return f"this worker does not offer {describe_target(command.work)}"
        slots = backend.slots
        if slots.jobs >= slots.size + BACKLOG_MAX:
            return f"{BACKLOG_MAX} jobs are waiting already"
        if can_refuse and slots.busy_with_others(backend.jobs):
            return f"all {slots.size} slots of the engine are busy"
        job_id = command.job_id
        task = self._tasks.create_task(self._run(command, backend))
        self._running[job_id] = task
        self._returnable.pop(job_id, None)
        if can_refuse and command.returnable:
            self._returnable[job_id] = command.lease
        backend.jobs += 1
        slots.jobs += 1
        task.add_done_callback(partial(self._on_task_done, job_id, backend))
        return None

    def cancel(self, job_id: JobId) -> None:
        """Cancel a job, if it still runs; it reports nothing more."""
        if job_id in self._running:
            self._running[job_id].cancel()

    def hand_over(self, why: str = "") -> list[tuple[JobId, LeaseNumber]]:
        """Cancel the jobs that others can take over; return them, to be rejected.

        ``why`` is the message of the cancellation: ``AWAY``, or none.
        """
        handed_over = [*self._returnable.items()]
        for job_id, _ in handed_over:
            self._running[job_id].cancel(why)
        self._returnable.clear()
        return handed_over

    def cancel_all(self) -> None:
        """Cancel all jobs, because there is no coordinator for them."""
        for task in self._running.values():
            task.cancel(AWAY)

    def _on_task_done(
        self, job_id: JobId, backend: ModelBackend, task: asyncio.Task[None]
    ) -> None:
        backend.jobs -= 1
        slots = backend.slots
        slots.jobs -= 1
        if not slots.jobs and slots.idle is not None:
            slots.idle.set()
            slots.idle = None
        if self._running.get(job_id) is task:
            # Otherwise the job was cancelled, and started again since.
            del self._running[job_id]
            self._returnable.pop(job_id, None)
        self._on_ended()

    async def _run(self, command: words.RunJob, backend: ModelBackend) -> None:
        if command.trace:
            await self._run_traced(command, backend)
            return
        async with backend.slots:
            await self._send(await self._answer(command, backend))

    async def _run_traced(self, command: words.RunJob, backend: ModelBackend) -> None:
        if self._traces is None:
            if read_traceparent(command.trace) is not None:
                TRACEPARENT.set(command.trace)
            async with backend.slots:
                await self._send(await self._answer(command, backend))
            return
        with self._traces.job(command) as span:
            TRACEPARENT.set(span.traceparent)
            async with backend.slots:
                self._traces.on_slot(span)
                span.end = await self._answer(command, backend)
                await self._send(span.end)

    async def _answer(
        self, command: words.RunJob, backend: ModelBackend
    ) -> words.Completed | words.Rejected | words.Failed:
        """Stream the answer; return its final event."""
        job_id, lease = command.job_id, command.lease
        runner, work = backend.runner, command.work
        begun = command.continues, command.thoughts
        if command.trim:
            answer = run_trimmed(runner, work, *begun)
        else:
            answer = runner.run(work, *begun)
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Finished):
                        return words.Completed(
                            job_id, lease, piece.finish_reason, piece.usage
                        )
                    if isinstance(piece, Progress):
                        told = (piece.share, piece.remark)
                        await self._send(words.CallProgress(job_id, lease, *told))
                        continue
                    await self._send(words.AnswerChunk(job_id, lease, [piece]))
            return words.Failed(job_id, lease, "the engine stopped without an answer")
        except (errors.Unavailable, errors.ClientError, errors.JobError) as error:
            if isinstance(error, errors.Unavailable):
                backend.on_unavailable()
            return failure_event(job_id, lease, error)
        except Exception as error:
            # A bug in an engine fails its own job only.
            log.exception("engine failed job=%s", job_id)
            return words.Failed(
                job_id, lease, f"the engine failed: {type(error).__name__}"
            )
