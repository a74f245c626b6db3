"""One coordinator's inference jobs, and the models and slots that they run in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.errors import (
    ClientError,
    ContextExceeded,
    JobError,
    NotFound,
    Unavailable,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Work, describe_target
from shoal.engines.engine import Finished, WorkRunner


class EngineSlots:
    """Shared by the agents of one engine, each of which offers all of them.

    ``jobs`` is how many the agents have between them, also those that wait for a slot.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = asyncio.Semaphore(size)
        self.jobs = 0

    def busy_with_others(self, own: int) -> bool:
        """Say whether all are taken, and not by an agent's ``own`` jobs alone.

        Its coordinator cannot know: it counts the jobs of each model for itself.
        """
        return own < self.size <= self.jobs


def _untroubled() -> None:
    """Take note of nothing."""


@dataclass(slots=True, eq=False)
class ModelBackend:
    """One of an engine's models, as one coordinator's jobs find it.

    ``on_unavailable`` is told when the engine did not take a job, and ``jobs`` counts
    those
    that the coordinator has here, also those that wait for a slot.
    """

    runner: WorkRunner
    slots: EngineSlots
    on_unavailable: Callable[[], None] = _untroubled
    jobs: int = 0

    @property
    def free_slots(self) -> int:
        """How many more jobs would run at once, whichever models they are for."""
        return self.slots.size - self.slots.jobs


FindModel: TypeAlias = Callable[[Work], ModelBackend | None]
"""Says where work is to be done; None: nowhere here."""


def only_model(
    runner: WorkRunner, slots: EngineSlots, trouble: Callable[[], None] = _untroubled
) -> FindModel:
    """Return what sends all work to one place, on wires that know one model."""
    place = ModelBackend(runner, slots, trouble)
    return lambda work: place


def failure_event(
    job_id: JobId,
    lease: LeaseNumber,
    error: Unavailable | NotFound | ClientError | JobError,
) -> Event:
    """Return the event that reports why a job did not complete.

    Another worker may do what this one rejects; it cannot help what has failed.
    """
    match error:
        case Unavailable() | NotFound():
            return Rejected(job_id, lease, str(error))
        case ContextExceeded():
            return Failed(job_id, lease, str(error), Fault.CONTEXT)
        case ClientError():
            return Failed(job_id, lease, str(error), Fault.REQUEST)
        case JobError():
            return Failed(job_id, lease, str(error))


BACKLOG_MAX = 256  # jobs that may wait for a slot; a coordinator has no use for more

log = logging.getLogger("shoal.worker")


class RunningJobs:
    """Runs jobs where they belong, and says what comes of them.

    Args:
        find: where a job is done.
        say: says an event once there is a connection with room for it.
        ended: called when there is one job fewer.
        tasks: entered as long as there may be jobs.
    """

    def __init__(
        self,
        find: FindModel,
        say: Callable[[Event], Awaitable[None]],
        ended: Callable[[], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._find = find
        self._say = say
        self._ended = ended
        self._tasks = tasks
        self._running: dict[JobId, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, command: RunJob, *, can_refuse: bool) -> str | None:
        """Begin a job, or say why it cannot be taken.

        ``can_refuse`` says whether the wire gives jobs back; where it does not, they
        wait for other models' jobs.
        """
        place = self._find(command.work)
        if place is None:
            return f"this worker does not offer {describe_target(command.work)}"
        slots = place.slots
        if slots.jobs >= slots.size + BACKLOG_MAX:
            return f"{BACKLOG_MAX} jobs are waiting already"
        if can_refuse and slots.busy_with_others(place.jobs):
            return f"all {slots.size} slots of the engine are busy"
        job_id = command.job_id
        task = self._tasks.create_task(self._run(command, place))
        self._running[job_id] = task
        place.jobs += 1
        slots.jobs += 1
        task.add_done_callback(lambda task: self._over(job_id, place, task))
        return None

    def cancel(self, job_id: JobId) -> None:
        """Stop a job, if it still runs; nothing more is said of it."""
        if job_id in self._running:
            self._running[job_id].cancel()

    def cancel_all(self) -> None:
        """Stop whatever runs."""
        for task in self._running.values():
            task.cancel()

    def _over(
        self, job_id: JobId, place: ModelBackend, task: asyncio.Task[None]
    ) -> None:
        place.jobs -= 1
        place.slots.jobs -= 1
        if self._running.get(job_id) is task:
            # Else it was cancelled, and has been given anew already.
            del self._running[job_id]
        self._ended()

    async def _run(self, command: RunJob, place: ModelBackend) -> None:
        async with place.slots.running:
            await self._say(await self._answer(command, place))

    async def _answer(self, command: RunJob, place: ModelBackend) -> Event:
        """Say the answer as it comes; return how it ended."""
        job_id, lease = command.job_id, command.lease
        answer = place.runner.run(command.work, command.continues)
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Finished):
                        return Completed(
                            job_id, lease, piece.finish_reason, piece.usage
                        )
                    await self._say(AnswerChunk(job_id, lease, [piece]))
            return Failed(job_id, lease, "the engine stopped without a word")
        except (Unavailable, ClientError, JobError) as error:
            if isinstance(error, Unavailable):
                place.on_unavailable()
            return failure_event(job_id, lease, error)
        except Exception as error:
            # An engine is somebody else's program: its bug fails the job it was
            # working on, and no other.
            log.exception("engine failed job=%s", job_id)
            return Failed(job_id, lease, f"the engine failed: {type(error).__name__}")
