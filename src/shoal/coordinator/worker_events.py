"""Receives events of workers: text goes into answers, the rest becomes hub input."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from shoal.coordinator.answer import Answer, ReaderTooSlow, UnusableOutput
from shoal.coordinator.connections import WorkerConnections, WorkerRegistration
from shoal.coordinator.receipt_verifier import HubMail, PresentedReceipt
from shoal.domain import vocabulary as words
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import Outcome
from shoal.domain.worker import THROTTLE_MAX, MachineHealth, WorkerLoad
from shoal.pool import inputs
from shoal.pool.open_job import NO_LEASE
from shoal.pool.state import PoolState
from shoal.protocols.seam.session import CloseCode
from shoal.transports.clock import Clock, Timer

NO_ROOM = "the coordinator's store is failing: try again later"


STARTED_AFTER = 0.25  # seconds until the hub learns that an answer has begun
REPORT_INTERVAL = 0.25  # seconds between reports of one worker
SPEED_MIN = 0.01  # of full speed
QUEUED_MAX = 10_000  # jobs of other pools that a worker may report
LENT_MAX = 1024  # slots that tasks of a worker lend
UNFIT_MAX = 200  # characters of the reason why a worker gets no jobs
REMARK_MAX = 200  # characters of what a worker says about its progress
SETTLED_WITHIN = 2.0  # seconds in which clients say what they have of an answer


@dataclass(slots=True)
class _Report:
    """A worker's last report, and when the next one may be passed on."""

    pass_on_from: float
    load: WorkerLoad
    timer: Timer | None = None


class LoadReports:
    """Passes a report on at once, and the latest of those that follow soon after later.

    A worker that reports a thousand times a second does not slow the hub down, and its
    last report still counts.
    """

    def __init__(
        self, clock: Clock, post: Callable[[inputs.LoadReported], None]
    ) -> None:
        self._clock = clock
        self._post = post
        self._reports: dict[WorkerId, _Report] = {}

    def submit(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Accept a report."""
        load, now = _bounded(load), self._clock.now()
        report = self._reports.get(worker_id)
        if report is None:
            report = self._reports[worker_id] = _Report(now, load)
        report.load = load
        if now >= report.pass_on_from:
            self._pass_on(worker_id, report)
        elif report.timer is None:
            report.timer = self._clock.call_at(
                report.pass_on_from, lambda: self._pass_on(worker_id, report)
            )

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker that disconnected."""
        report = self._reports.pop(worker_id, None)
        if report is not None and report.timer is not None:
            report.timer.cancel()

    def _pass_on(self, worker_id: WorkerId, report: _Report) -> None:
        if report.timer is not None:
            report.timer.cancel()
            report.timer = None
        report.pass_on_from = self._clock.now() + REPORT_INTERVAL
        self._post(inputs.LoadReported(worker_id, report.load))


def _bounded(load: WorkerLoad) -> WorkerLoad:
    """Return the load within limits, whatever the worker reported."""
    speed = load.speed if math.isfinite(load.speed) else 1.0
    return replace(
        load,
        unfit=load.unfit[:UNFIT_MAX],
        queued=min(max(load.queued, 0), QUEUED_MAX),
        speed=min(max(speed, SPEED_MIN), 1.0),
        lent=min(max(load.lent, 0), LENT_MAX),
        throttle=min(max(load.throttle, 0), THROTTLE_MAX),
    )


@dataclass(slots=True, eq=False)
class _Settling:
    """Waits for ``count`` clients, or until its ``timer`` ends it; then goes on."""

    count: int
    then: Callable[[], None]
    timer: Timer | None = None

    def on_settled(self) -> None:
        self.count -= 1
        if not self.count:
            self.end()

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.then()


@dataclass(slots=True, eq=False)
class WorkerEvents:
    """Receives events of all workers, and posts inputs to the hub.

    The hub learns of a first output a moment later, or with the end that comes before
    that: most answers are short, and a fact for each of them costs as much as a lease.
    ``hedges``: it learns it at once, since that decides between two workers.

    ``has_room`` says whether there is room for what a worker sends; None: for another
    worker.  ``health`` is that of workers' machines, if they report it.
    """

    _pool: PoolState
    _answers: Mapping[JobId, Answer]
    _workers: WorkerConnections
    _clock: Clock
    _post: Callable[[HubMail], None]
    _has_room: Callable[[WorkerId | None], bool]
    _hedges: bool
    health: dict[WorkerId, MachineHealth] = field(default_factory=dict)
    is_over: bool = False  # whether the coordinator has disconnected all workers
    _load_reports: LoadReports = field(init=False)
    _timer: Timer | None = None  # for those that have begun
    # The first outputs that the hub does not know, and their monotonic times.
    _begun: dict[JobId, tuple[LeaseNumber, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._load_reports = LoadReports(self._clock, self._post)

    def on_event(self, connection: WorkerRegistration, event: words.Event) -> None:
        """Process an event from a connection."""
        if isinstance(event, words.AnswerChunk):
            self.on_chunk(event)
            return
        if isinstance(event, words.Joined):
            if not self._has_room(None):
                _send_away(connection)
                return
            self.on_disconnect(connection, "joined anew")
            worker_id = self._workers.register(connection, event.name)
            cancels = words.CancelJob in connection.connection.accepts
            shared = connection.via is not None
            running = event.running
            connection.running = running or ()
            self._post(
                inputs.WorkerConnected(worker_id, event.offer, cancels, shared, running)
            )
            return
        sender = self._workers.worker_of(connection)
        if sender is None:
            return  # replaced by a newer connection, but still open
        if isinstance(event, words.CallsReturned):
            self._on_results(event)
            return
        if not self._has_room(sender):
            _send_away(connection)
            return
        match event:
            case words.Completed():
                self._on_completed(sender, event)
            case words.Rejected() | words.Failed():
                self.tell_begun()
                self._post(inputs.LeaseResult(sender, event))
            case words.Draining():
                self._post(inputs.DrainAnnounced(sender, event))
            case words.HealthReported(health):
                self.health[sender] = health
            case words.LoadChanged(load):
                self._load_reports.submit(sender, load)
            case words.CallProgress():
                self._on_progress(event)
            case words.OffersChanged() | words.CallMessage() | ModelMessage():
                pass  # about a peer as a whole
            case words.ReceiptSent(job_id, receipt):
                worker = self._pool.workers.get(sender)
                if worker is not None and worker.offer.public_key:
                    key = worker.offer.public_key
                    self._post(PresentedReceipt(sender, key, job_id, receipt))

    def on_disconnect(self, connection: WorkerRegistration, reason: str) -> None:
        """Handle the end of a connection."""
        if (worker_id := self._workers.unregister(connection)) is not None:
            self.health.pop(worker_id, None)
            self._load_reports.forget(worker_id)
            self.tell_begun()
            if not self.is_over:
                self._post(inputs.WorkerDisconnected(worker_id, reason))

    def settle(self, connection: WorkerRegistration, then: Callable[[], None]) -> None:
        """Call ``then`` once the hub has all text that a worker's clients have.

        It may have sent them pieces past this process, and no copies of the last.
        """
        worker_id = self._workers.worker_of(connection)
        worker = None if worker_id is None else self._pool.workers.get(worker_id)
        leases = () if worker is None or self.is_over else worker.leases
        answers = [self._answers[each] for each in leases if each in self._answers]
        remote = [
            reader
            for answer in answers
            if answer.worker_id == worker_id
            for reader in answer.remote_readers
        ]
        if not remote:
            then()
            return
        settling = _Settling(len(remote), then)
        latest = self._clock.now() + SETTLED_WITHIN
        settling.timer = self._clock.call_at(latest, settling.end)
        for reader in remote:
            reader.settle(settling.on_settled)

    def _begin(self, job_id: JobId, lease: LeaseNumber, now: float) -> None:
        """Note a first output; notify the hub shortly."""
        self._begun[job_id] = lease, now
        if self._hedges:
            self.tell_begun()
        elif self._timer is None:
            self._timer = self._clock.call_at(now + STARTED_AFTER, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tell_begun()

    def tell_begun(self) -> None:
        """Notify the hub of the first outputs that it does not know."""
        for job_id, (lease, _) in self._begun.items():
            self._post(inputs.FirstOutput(job_id, lease))
        self._begun.clear()

    def on_chunk(self, event: words.AnswerChunk) -> None:
        """Process a piece of an answer, from whichever worker has its lease."""
        # The hot path, once per token: no task, no lock, and a fact only for the first.
        answer = self._answers.get(event.job_id)
        if answer is None or answer.end is not None:
            return
        if not answer.accepts_lease(event.lease):
            return
        try:
            now = self._clock.now()
            if answer.append(event.pieces, now, copied=event.copied):
                self._begin(event.job_id, event.lease, now)
        except (ReaderTooSlow, UnusableOutput) as problem:
            self._stop_answer(event.job_id, problem)

    def _on_results(self, event: words.CallsReturned) -> None:
        # The hot path of a call stream, once per call: no fact, no task, no lock.
        answer = self._answers.get(event.job_id)
        if answer is not None and answer.lease == event.lease:
            answer.deliver_results(event.results)

    def _on_progress(self, event: words.CallProgress) -> None:
        answer = self._answers.get(event.job_id)
        if answer is not None and answer.accepts_lease(event.lease):
            share, remark = event.share, event.remark[:REMARK_MAX]
            if share is not None and not 0.0 <= share <= 1.0:
                share = None  # a worker may send any number, NaN, too
            answer.report_progress(share, remark, self._clock.now())

    def _on_completed(self, worker_id: WorkerId, event: words.Completed) -> None:
        answer = self._answers.get(event.job_id)
        if (
            answer is None
            or event.lease == NO_LEASE
            or not answer.accepts_lease(event.lease)
        ):
            self._post(inputs.LeaseResult(worker_id, event))
            return
        if event.value:
            value, blobs = event.value, event.blobs
            outcome = Outcome("", event.finish_reason, value=value, blobs=blobs)
            self._post(inputs.LeaseResult(worker_id, event, outcome))
            return
        try:
            if event.rest:
                # No FirstOutput: the result follows.
                now = self._clock.now()
                answer.append(event.rest, now, copied=event.copied)
            answer.check_complete()
        except (ReaderTooSlow, UnusableOutput) as problem:
            self._stop_answer(event.job_id, problem)
        # Posted even so: on a wire that cannot cancel, only the result frees the slot.
        outcome = answer.assemble(event.finish_reason, event.usage)
        if event.output:
            outcome = replace(outcome, output=event.output)
        first_output = 0.0
        if (begun := self._begun.pop(event.job_id, None)) is not None:
            first_output = self._clock.wall() - (self._clock.now() - begun[1])
        self._post(
            inputs.LeaseResult(worker_id, event, outcome, first_output=first_output)
        )

    def _stop_answer(
        self, job_id: JobId, problem: ReaderTooSlow | UnusableOutput
    ) -> None:
        """End a job whose answer cannot go on; a detached one needs no reader."""
        if isinstance(problem, UnusableOutput):
            self.tell_begun()
            self._post(inputs.AnswerRejected(job_id, str(problem), problem.lost))
            return
        job = self._pool.jobs.get(job_id)
        if job is None or job.job.unattended <= 0:
            self._post(inputs.Cancellation(job_id, "the client reads too slowly"))


def _send_away(registration: WorkerRegistration) -> None:
    """Disconnect a worker whose events could not be stored for long."""
    registration.connection.disconnect(NO_ROOM, CloseCode.TRY_AGAIN_LATER, NO_ROOM)


class WorkerPort:
    """Receives the events and the end of one connection."""

    def __init__(self, events: WorkerEvents, connection: WorkerRegistration) -> None:
        self._events = events
        self._connection = connection
        self.on_event = partial(events.on_event, connection)
        """Processes an event of the worker."""

        self.on_chunk = events.on_chunk
        """Processes a piece of an answer, as ``on_event`` does."""

    def on_disconnect(self, reason: str) -> None:
        """Handle the end of the connection."""
        end = partial(self._events.on_disconnect, self._connection, reason)
        self._events.settle(self._connection, end)
