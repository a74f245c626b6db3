"""Runs jobs that a peer submits, and sends back the answers."""

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

JOBS_MAX = 64  # open jobs per peer
CALLS_MAX = 4096  # open jobs per peer, for function calls
FILTERED_OUTCOME = Outcome("", "content_filter")

WaitForRoom: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until a peer has read most of what was sent to it, or has left."""

StartTask: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts a task that ends no later than the peer's connection."""

log = logging.getLogger("shoal.peers")


@dataclass(frozen=True, slots=True)
class PeerJobPolicy:
    """The policy for jobs of all peers.

    ``limits`` are their time limits, ``prices`` their prices, and ``moderation`` is
    applied to their requests and answers.
    """

    limits: TimeLimits = TimeLimits()  # noqa: RUF009  # it is frozen
    prices: PriceList = PriceList()  # noqa: RUF009  # it is frozen
    moderation: Moderation | None = None


DEFAULT_POLICY = PeerJobPolicy()


class InboundJobs:
    """The open jobs of one peer.

    The peer chooses the job ids on its wire; in the hub the jobs have new ids, and
    ``owner`` as their owner.  They never run on other pools, so that no job loops
    between pools.

    ``say`` sends an event to the peer, and ``peer`` is the connection that large values
    are sent on.
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
        """Start a job; its answer is sent to the peer as it is produced."""
        number = (asked.job_id, asked.lease)
        if number in self._open:
            return  # a duplicate: the job is already running
        if (reason := self._why_refused(asked)) is not None:
            self._send(Rejected(*number, reason))
            return
        task = self._open[number] = self._begin(self._answer(asked))
        task.add_done_callback(lambda _: self._open.pop(number, None))

    def cancel(self, word: CancelJob) -> None:
        """Cancel a job if it is open; nothing more is sent about it."""
        if (task := self._open.get((word.job_id, word.lease))) is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all jobs: the peer has left."""
        for task in self._open.values():
            task.cancel()

    def _why_refused(self, asked: RunJob) -> str | None:
        if isinstance(asked.work, CallStream):
            return "call streams run only between a pool and its own workers"
        most = CALLS_MAX if isinstance(asked.work, Call) else JOBS_MAX
        if len(self._open) >= most:
            return f"this peer already has {most} open jobs here"
        if asked.continues:
            return "this pool cannot continue an answer that another pool began"
        return None

    async def _answer(self, asked: RunJob) -> None:
        number = (asked.job_id, asked.lease)
        job = self._job(asked.work)
        log.debug("asked owner=%r job=%s as=%r", self._owner, job.id, asked.job_id)
        try:
            watch = self._moderated(asked.work)
            if isinstance(asked.work, Call):
                # A peer that maps a function submits many calls at once, so they wait
                # for room in the queue.  The job is submitted before the next await, so
                # the place can be released at once.
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
        """Return a moderator for the answer; None without moderation.

        Raises InvalidRequest if the request itself matches the moderation list.
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
    """Return the texts of a request that moderation checks."""
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
    """Return the event that ends a failed job.

    A job that may succeed elsewhere is rejected, so that the peer tries another worker.
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
