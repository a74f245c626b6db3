"""Runs the lines of batches as jobs of the pool, under the quotas of their keys."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from shoal.batches import line_jobs
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.errors import (
    Cancelled,
    DaySpent,
    InvalidRequest,
    NotReady,
    NoWorker,
    PaymentsDown,
    QueueFull,
    RateLimited,
    ShoalError,
    ShuttingDown,
    StoreError,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Policy, Priority
from shoal.domain.outcome import Outcome
from shoal.gateway.batches import lines
from shoal.gateway.chat.job_answers import check_work, shown_outcome
from shoal.gateway.context import Gateway, JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.jobs.job_options import fitting_work
from shoal.pool.job_admission import unknown_model
from shoal.pool.models.aliases import alias_of, real_model
from shoal.pool.roster import SPECIAL_QUEUES
from shoal.store.batches import BatchStatus, LineResult, StoredBatch, line_key

AHEAD_MIN = 2  # lines that wait, so that no slot is idle until the next one comes
AHEAD_SHARE = 4  # a quarter of the slots may wait, too
QUEUED_MAX = 100  # jobs in the queue from which on no line joins it
READING_MAX = 4  # lines that are read and decoded at a time
LOST_MAX = 3  # times that a line may lose all its workers
PAUSE_MIN = 1.0  # seconds until a postponed line is tried again
PAUSE_MAX = 60.0  # even a day that is spent: the operator may raise the limit
WITH_BATCH = "its batch has ended"

log = logging.getLogger("shoal.gateway")

POSTPONING = (
    *(DaySpent, NotReady, NoWorker, PaymentsDown, QueueFull, RateLimited, ShuttingDown),
    *(StoreError, UnknownModel),
)
"""Errors that pass: their line waits, for as long as its batch lasts."""


@dataclass(slots=True)
class PoolLineJobs:
    """Runs lines on the workers of the pool, when they have nothing better to do."""

    gateway: Gateway
    # Jobs of the lines that run, by the id of their batch.
    _open: dict[str, set[JobId]] = field(default_factory=dict)
    _lost: Counter[str] = field(default_factory=Counter)  # by idempotency key
    # A line has up to 17 MiB until only its job is left of it.
    _reading: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(READING_MAX)
    )

    @property
    def _jobs_gateway(self) -> JobsGateway:
        return self.gateway.select(JobsGateway)

    def check(self, endpoint: str, data: bytes) -> line_jobs.CheckedLine:
        line = lines.decode_line(data)
        if line.url != endpoint:
            raise InvalidRequest(f"url: expected {endpoint}, as the batch", "url")
        return line_jobs.CheckedLine(line.custom_id, lines.model_of(line))

    def rejection(self, batch: StoredBatch, model: str) -> str | None:
        pool, now = self.gateway.hub.pool, self.gateway.clock.now()
        if model in SPECIAL_QUEUES or not (
            pool.roster.knows_model(model, now) or alias_of(pool, model)
        ):
            return unknown_model(pool.roster.names, model)
        return None

    def room(self, owner: str, model: str) -> int:
        pool = self.gateway.hub.pool
        real = real_model(pool, model, owner, None)
        # One line has a model loaded that none has.
        slots = pool.roster.slots[real] or int(pool.roster.has_to_load(real))
        waiting = min(QUEUED_MAX - pool.queued, self.gateway.hub.queue_room(owner))
        if slots <= 0 or waiting <= 0:
            return 0
        return slots + max(AHEAD_MIN, slots // AHEAD_SHARE)

    def on_room(self, call: Callable[[], None]) -> None:
        self.gateway.hub.on_queue_room(call)

    async def run(self, request: line_jobs.LineRequest) -> line_jobs.LineEnd:
        line = _RunningLine(request, line_key(request.batch.id, request.line))
        try:
            end = await self._run(line)
        except Exception:
            # A restart would run the line again, and end in the same way.
            log.exception("batch=%s line=%d", request.batch.id, request.line)
            end = line.failed(ShoalError("the coordinator failed: its log says why"))
        if not isinstance(end, line_jobs.LinePostponed):
            del self._lost[line.key]
        return end

    def cancel(self, batch: StoredBatch) -> None:
        for job_id in self._open.get(batch.id, ()):
            self.gateway.hub.cancel(job_id, WITH_BATCH)

    def left_out(
        self, batch: StoredBatch, line: int, data: bytes, status: BatchStatus
    ) -> LineResult:
        return LineResult(line, lines.encode_left_out(data, status), failed=True)

    async def _run(self, line: "_RunningLine") -> line_jobs.LineEnd:
        try:
            caller = self.gateway.access.caller_of(line.request.batch.owner)
            decoded = await self._read(line, caller)
            running = await self._running(
                self._job(line, decoded, caller), caller, line
            )
            if running is None:
                return line_jobs.LineGivenUp()
            async with running as reader:
                line.job_id = reader.job_id
                with self._cancellable(line.request.batch.id, reader.job_id):
                    outcome = await reader.outcome()
            return await self._result(line, decoded, reader.job_id, outcome)
        except Unauthorized as error:
            return line_jobs.LineUnauthorized(str(error))
        except ShoalError as error:
            return self._end_by(error, line)

    async def _read(self, line: "_RunningLine", caller: ApiCaller) -> lines.DecodedLine:
        """Read the request of a line, and moderate it.

        Only what the job has of it stays in memory.  Raises InvalidRequest, StoreError.
        """
        async with self._reading:
            data = await line.request.read()
            entry = await asyncio.to_thread(lines.decode_line, data)
            line.custom_id = entry.custom_id
            decode = lines.DIALECTS[entry.url]
            decoded = await decode(self._jobs_gateway, caller, bytes(entry.body))
        check_work(self._jobs_gateway, caller.name, decoded.work, decoded.field)
        return decoded

    def _job(
        self, line: "_RunningLine", decoded: lines.DecodedLine, caller: ApiCaller
    ) -> Job:
        gateway = self.gateway
        work = gateway.jobs.with_real_model(decoded.work, caller.name)
        alias = "" if work is decoded.work else decoded.work.model
        work, left_out = fitting_work(gateway.jobs, work, caller.name)
        price = gateway.prices.price(Policy.CHEAP, work.kind)
        return Job(
            gateway.hub.new_id(),
            work,
            replace(
                gateway.limits, queue=line.request.seconds, without_worker=math.inf
            ),
            caller.name,
            Priority.LOW,
            idempotency_key=line.key,
            terms=JobTerms(
                policy=Policy.CHEAP,
                price=price,
                detached=True,
                api_fields=decoded.api_fields,
                left_out=tuple(left_out),
                alias=alias,
            ),
        )

    async def _running(
        self, job: Job, caller: ApiCaller, line: "_RunningLine"
    ) -> AbstractAsyncContextManager[AnswerCursor] | None:
        """Return the job of a line: the one that it has, or a new one if it may begin.

        Raises KeyReused, StoreError.
        """
        if await self.gateway.hub.is_duplicate(job):
            # It counts as it did before: a spent budget does not hide its result.
            return self.gateway.hub.run_job(job)
        if line.request.may_begin:
            return self.gateway.access.submit(job, caller)
        return None

    @contextmanager
    def _cancellable(self, batch_id: str, job_id: JobId) -> Iterator[None]:
        """Let a job be cancelled with its batch within the block."""
        jobs = self._open.setdefault(batch_id, set())
        jobs.add(job_id)
        try:
            yield
        finally:
            jobs.remove(job_id)
            if not jobs:
                del self._open[batch_id]

    async def _result(
        self,
        line: "_RunningLine",
        decoded: lines.DecodedLine,
        job_id: JobId,
        outcome: Outcome,
    ) -> LineResult:
        """Return the result of a job that is done.  Raises JobError."""
        owner = line.request.batch.owner
        shown = shown_outcome(self._jobs_gateway, owner, decoded.work, outcome)
        created = int(self.gateway.clock.wall())

        def encode() -> bytes:
            body = decoded.encode(job_id, shown, created)
            return lines.encode_response(line.custom_id, job_id, body)

        return LineResult(line.request.line, await asyncio.to_thread(encode))

    def _end_by(self, error: ShoalError, line: "_RunningLine") -> line_jobs.LineEnd:
        """Return what follows from an error."""
        if isinstance(error, Cancelled) and str(error) == WITH_BATCH:
            return line_jobs.LineGivenUp()
        if isinstance(error, WorkerLost):
            self._lost[line.key] += 1
        again = isinstance(error, WorkerLost) and self._lost[line.key] < LOST_MAX
        if not (again or isinstance(error, POSTPONING)):
            return line.failed(error)
        if not line.request.may_begin:
            return line_jobs.LineGivenUp()
        pause = error.retry_after if isinstance(error, Unavailable) else PAUSE_MIN
        seconds = min(max(pause, PAUSE_MIN), PAUSE_MAX)
        return line_jobs.LinePostponed(seconds, str(error), alone=again)


@dataclass(slots=True)
class _RunningLine:
    """A line, and what is known of it so far."""

    request: line_jobs.LineRequest
    key: str  # its job's idempotency key
    custom_id: str = ""
    job_id: JobId | None = None

    def failed(self, error: ShoalError) -> LineResult:
        """Return the result that an error is."""
        body = lines.encode_failure(self.custom_id, self.job_id, error)
        return LineResult(self.request.line, body, failed=True)
