"""Runs jobs that a peer submits, and sends back the answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from shoal.coordinator.backlog import Backlog
from shoal.coordinator.connections import WorkerConnection
from shoal.coordinator.hub import Hub
from shoal.domain import errors
from shoal.domain import vocabulary as words
from shoal.domain import work as works
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, JobTerms, Policy, TimeLimits
from shoal.domain.moderation import FILTERED, AnswerModerator, Moderation
from shoal.domain.outcome import Fault
from shoal.domain.trace_context import read_traceparent
from shoal.ledger.accounts import PriceList
from shoal.pool.functions import call_limits
from shoal.pool.own_offers import own_slots

JOBS_MAX = 64  # open jobs per peer, or as many as the pool offers slots
CALLS_MAX = 4096  # open jobs per peer, for function calls

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


@dataclass(slots=True, eq=False)
class InboundJobs:
    """The open jobs of one peer.

    The peer chooses the job ids on its wire; in the hub the jobs have new ids, and
    ``owner`` as their owner.  They never run on other pools, nor on the peer itself,
    so that no job goes in a circle.

    ``send`` sends an event to the peer, and ``peer`` is the connection for large
    values.
    """

    _hub: Hub
    _owner: str
    _policy: PeerJobPolicy
    _start_task: StartTask
    _send: Callable[[words.Event], bool]
    _wait_for_room: WaitForRoom
    _peer: WorkerConnection
    _backlog: Backlog = field(init=False)
    _open: dict[tuple[JobId, LeaseNumber], asyncio.Task[None]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._backlog = Backlog(self._hub, self._owner)

    def start(self, command: words.RunJob) -> None:
        """Start a job; its answer is sent to the peer as it is produced."""
        key = (command.job_id, command.lease)
        if key in self._open:
            return  # a duplicate: the job is already running
        if (reason := self._rejection_reason(command)) is not None:
            self._send(words.Rejected(*key, reason))
            return
        task = self._open[key] = self._start_task(self._answer(command))
        task.add_done_callback(lambda _: self._open.pop(key, None))

    def cancel(self, command: words.CancelJob) -> None:
        """Cancel a job if it is open; nothing more is sent about it."""
        if (task := self._open.get((command.job_id, command.lease))) is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all jobs: the peer has left."""
        for task in self._open.values():
            task.cancel()

    def _rejection_reason(self, command: words.RunJob) -> str | None:
        if isinstance(command.work, works.CallStream):
            return "call streams run only between a pool and its own workers"
        if isinstance(command.work, works.ModelOrder):
            return "what is loaded on a pool's machines is its own coordinator's choice"
        limit = CALLS_MAX if isinstance(command.work, works.Call) else JOBS_MAX
        if len(self._open) >= limit:
            limit = max(limit, own_slots(self._hub.pool))
        if len(self._open) >= limit:
            return f"this peer already has {limit} open jobs here"
        if command.continues or command.thoughts:
            return "this pool cannot continue an answer that another pool began"
        return None

    async def _answer(self, command: words.RunJob) -> None:
        key = (command.job_id, command.lease)
        job = self._job(command)
        log.debug(
            "submitted owner=%r job=%s as=%r", self._owner, job.id, command.job_id
        )
        try:
            moderator = self._moderated(command.work)
            if isinstance(command.work, works.Call):
                # A peer that maps a function submits many calls at once, so they wait
                # for room in the queue.  The job is submitted before the next await, so
                # the place can be released at once.
                (await self._backlog.reserve(key)).release()
            async with self._hub.run_job(job) as reader:
                while pieces := await reader.read():
                    allowed = (
                        pieces if moderator is None else [*moderator.filter(pieces)]
                    )
                    if allowed:
                        self._send(words.AnswerChunk(*key, allowed))
                    if moderator is not None and moderator.blocked:
                        break
                    await self._wait_for_room()
                else:
                    outcome = await reader.outcome()
            if moderator is not None and (moderator.blocked or moderator.blocks_end()):
                outcome = FILTERED
        except errors.ShoalError as error:
            self._send(rejection_of(command, error))
            errors.release_frames(error)
        else:
            self._send_blobs(outcome.blobs)
            value, blobs = outcome.value, outcome.blobs
            end = words.Completed(*key, outcome.finish_reason, outcome.usage)
            self._send(replace(end, value=value, blobs=blobs) if value else end)

    def _send_blobs(self, digests: tuple[bytes, ...]) -> None:
        self._hub.blobs.send(self._peer, digests)

    def _moderated(self, work: works.Work) -> AnswerModerator | None:
        """Return a moderator for the answer; None without moderation.

        Raises InvalidRequest if the request itself matches the moderation list.
        """
        moderation = self._policy.moderation
        if moderation is None:
            return None
        if moderation.blocks_work(work):
            raise errors.InvalidRequest("the request matches the moderation list")
        return moderation.moderate_answer()

    def _job(self, command: words.RunJob) -> Job:
        work, remaining = command.work, command.remaining
        if not (isinstance(work, works.NamedWork) or work.model):
            work = replace(work, model=works.ANY_MODEL)
        price = self._policy.prices.price(Policy.FAST, work.kind)
        limits = self._policy.limits
        if isinstance(work, works.Call):
            limits = call_limits(work.timeout)
        if remaining is not None:
            limits = replace(limits, total=min(limits.total, remaining))
        # A peer never asks for a call again, so only one that has a receipt is stored.
        kept = price > 0 or not isinstance(work, works.Call)
        return Job(
            self._hub.new_id(),
            work,
            limits,
            self._owner,
            terms=JobTerms(
                price=price,
                near=True,
                peer=self._owner,
                kept=kept,
                trace=command.trace if read_traceparent(command.trace) else "",
            ),
        )


def rejection_of(
    command: words.RunJob, error: errors.ShoalError
) -> words.Rejected | words.Failed:
    """Return the event that ends a failed job.

    A job that may succeed elsewhere is rejected, so that the peer tries another worker.
    """
    key = (command.job_id, command.lease)
    match error:
        case errors.ContextExceeded():
            return words.Failed(*key, str(error), Fault.CONTEXT)
        case errors.TooLarge():
            return words.Failed(*key, str(error), Fault.SIZE)
        case errors.Unprocessable():
            return words.Failed(*key, str(error), Fault.VALUES)
        case errors.InvalidRequest() if not isinstance(error, errors.CannotDo):
            return words.Failed(*key, str(error), Fault.REQUEST)
        case errors.JobError():
            return words.Failed(*key, str(error), exception=error.exception)
        case _:
            return words.Rejected(*key, str(error))
