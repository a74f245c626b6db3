"""Runs the jobs that a peer submits, and sends it the answers."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TypeAlias

from shoal.coordinator.backlog import Backlog
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.domain.errors import (
    CannotDo,
    ContextExceeded,
    InvalidRequest,
    JobError,
    ShoalError,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.moderation import AnswerModerator, Moderation
from shoal.domain.outcome import Fault, Outcome
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import (
    ANY_MODEL,
    Call,
    CallStream,
    Chat,
    Completion,
    Embedding,
    Job,
    JobTerms,
    NamedWork,
    Policy,
    Task,
    TimeLimits,
    Work,
    message_text,
)
from shoal.ledger.prices import PriceList
from shoal.pool.functions import call_limits

JOBS_MAX = 64  # jobs of one peer that are open at a time
CALLS_MAX = 4096  # the same, where all of them are calls of functions
FILTERED_OUTCOME = Outcome("", "content_filter")

WaitForRoom: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until a peer has read most of what it was told, or is gone."""

StartTask: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts a task that ends with the peer's connection at the latest."""

log = logging.getLogger("shoal.neighbours")


@dataclass(frozen=True, slots=True)
class PeerJobPolicy:
    """What holds for the jobs of all peers.

    ``limits`` are how long they may take, ``prices`` what they cost, and ``moderation``
    what neither they nor their answers may match.
    """

    limits: TimeLimits = TimeLimits()  # noqa: RUF009  # it is frozen
    prices: PriceList = PriceList()  # noqa: RUF009  # it is frozen
    moderation: Moderation | None = None


DEFAULT_POLICY = PeerJobPolicy()


class InboundJobs:
    """A peer that asks.

    Its jobs are numbered by itself; here they have numbers of ours, and ``owner`` as
    their owner.  They are not given to other pools, so no job ever goes in a circle.

    ``say`` tells the peer something, and ``peer`` is who is given large values.
    """

    def __init__(
        self,
        hub: Hub,
        owner: str,
        house: PeerJobPolicy,
        begin: StartTask,
        say: Callable[[Event], bool],
        room: WaitForRoom,
        peer: WorkerConnection,
    ) -> None:
        self._hub = hub
        self._peer = peer
        self._owner = owner
        self._policy = house
        self._begin = begin
        self._send = say
        self._room = room
        self._backlog = Backlog(hub, owner)
        self._open: dict[tuple[JobId, LeaseNumber], asyncio.Task[None]] = {}

    def start(self, asked: RunJob) -> None:
        """Begin with a job; what comes of it is said as it comes."""
        number = (asked.job_id, asked.lease)
        if number in self._open:
            return  # said twice: it has its answer under way
        if (reason := self._why_refused(asked)) is not None:
            self._send(Rejected(*number, reason))
            return
        task = self._open[number] = self._begin(self._answer(asked))
        task.add_done_callback(lambda _: self._open.pop(number, None))

    def cancel(self, word: CancelJob) -> None:
        """Stop working on a job, if it is still open; nothing more is said about it."""
        if (task := self._open.get((word.job_id, word.lease))) is not None:
            task.cancel()

    def close(self) -> None:
        """Stop working on everything: the peer has gone."""
        for task in self._open.values():
            task.cancel()

    def _why_refused(self, asked: RunJob) -> str | None:
        if isinstance(asked.work, CallStream):
            return "lanes are between a pool and its own workers"
        most = CALLS_MAX if isinstance(asked.work, Call) else JOBS_MAX
        if len(self._open) >= most:
            return f"{most} jobs of this peer are open here already"
        if asked.continues:
            return "an answer that has begun cannot be gone on with here"
        return None

    async def _answer(self, asked: RunJob) -> None:
        number = (asked.job_id, asked.lease)
        job = self._job(asked.work)
        log.debug("asked owner=%r job=%s as=%r", self._owner, job.id, asked.job_id)
        try:
            watch = self._moderated(asked.work)
            if isinstance(asked.work, Call):
                # Who maps a function asks for many at once.  The place is taken as the
                # job is submitted, which is before anything else is waited for.
                (await self._backlog.reserve(number)).release()
            async with self._hub.run_job(job) as reader:
                while pieces := await reader.read():
                    shown = pieces if watch is None else [*watch.filter(pieces)]
                    if shown:
                        self._send(AnswerChunk(*number, shown))
                    if watch is not None and watch.blocked:
                        break
                    await self._room()
                else:
                    outcome = await reader.outcome()
            if watch is not None and (watch.blocked or watch.blocks_end()):
                outcome = FILTERED_OUTCOME
        except ShoalError as error:
            self._send(rejection_of(asked, error))
        else:
            self._send_blobs(outcome.blobs)
            value, blobs = outcome.value, outcome.blobs
            end = Completed(*number, outcome.finish_reason, outcome.usage)
            self._send(replace(end, value=value, blobs=blobs) if value else end)

    def _send_blobs(self, digests: tuple[bytes, ...]) -> None:
        self._hub.blobs.send(self._peer, digests)

    def _moderated(self, work: Work) -> AnswerModerator | None:
        """Begin to watch an answer, if that is wanted.

        Raises InvalidRequest if what is asked is on the list itself.
        """
        moderation = self._policy.moderation
        if moderation is None:
            return None
        if moderation.blocks(moderated_texts(work)):
            raise InvalidRequest("the request matches the moderation list")
        return moderation.moderate_answer()

    def _job(self, work: Work) -> Job:
        if not (isinstance(work, NamedWork) or work.model):
            work = replace(work, model=ANY_MODEL)
        price = self._policy.prices.price(Policy.FAST, work.kind)
        limits = self._policy.limits
        if isinstance(work, Call):
            limits = call_limits(work.timeout)
        return Job(
            self._hub.new_id(),
            work,
            limits,
            self._owner,
            terms=JobTerms(price=price, near=True),
        )


def moderated_texts(work: Work) -> list[str]:
    """Return what moderation has to look at."""
    match work:
        case Chat():
            return [message_text(message) for message in work.messages]
        case Task():
            return [json.dumps(work.payload, ensure_ascii=False)]
        case Embedding():
            return ["\n".join(work.inputs)]
        case Completion():
            return [work.text]
        case Call() | CallStream():
            return [work.name]


def rejection_of(asked: RunJob, error: ShoalError) -> Rejected | Failed:
    """Return what a peer is told instead of an answer.

    Whatever might go well elsewhere is rejected, so that the peer asks another.
    """
    number = (asked.job_id, asked.lease)
    match error:
        case ContextExceeded():
            return Failed(*number, str(error), Fault.CONTEXT)
        case InvalidRequest() if not isinstance(error, CannotDo):
            return Failed(*number, str(error), Fault.REQUEST)
        case JobError():
            return Failed(*number, str(error))
        case _:
            return Rejected(*number, str(error))
