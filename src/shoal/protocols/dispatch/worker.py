"""The worker's session with a coordinator, Shoal's or an original one."""

from collections.abc import Sequence

from msgspec import UnsetType

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, Fault, begun_answer
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallMessage,
    CancelJob,
    Command,
    Completed,
    Draining,
    Event,
    Failed,
    HealthReported,
    Joined,
    LoadChanged,
    OffersChanged,
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.domain.work import JobKind
from shoal.protocols.dispatch.codec.extension import read_attempt
from shoal.protocols.dispatch.codec.jobs import (
    JobAssignment,
    check_restrictions,
    decode_assignment,
    decode_job,
)
from shoal.protocols.dispatch.codec.messages import (
    REASON_MAX,
    CoordinatorMessage,
    decode_coordinator_message,
)
from shoal.protocols.dispatch.worker_encoder import WorkerEncoder
from shoal.protocols.dispatch.worker_jobs import (
    ANSWER_MAX,
    JOBS_MAX,
    RunningJob,
    WorkerJobs,
)
from shoal.protocols.seam.session import Batch, Close, Data, Notice, Output, Send

HEARTBEAT_INTERVAL = 10.0  # seconds
REGISTER_TIMEOUT = 10.0  # seconds until register_ack, as for original workers
ACK_TIMEOUT = 30.0  # seconds until a coordinator that acknowledges counts as lost


class DispatchWorkerSession:
    """Receives jobs from a coordinator and sends complete, signed answers.

    ``jobs`` outlives the connection.  After a reconnect, an original coordinator still
    expects the answers.  Shoal's coordinator has requeued the jobs, so the session
    first sends the answers that are finished, then cancels the jobs that still run.
    """

    def __init__(self, encoder: WorkerEncoder, jobs: WorkerJobs) -> None:
        extended = encoder.extended
        # At an original coordinator, a rejected job hangs forever.
        self.accepts: frozenset[type] = frozenset(
            {AnswerChunk, Completed, Failed, Draining, HealthReported}
            | ({Rejected} if extended else set())
        )
        self._extended = extended
        self._encoder = encoder
        self._jobs = jobs
        self._due: float | None = None
        self._registered = False
        self._closed = False
        self._draining: str | None = None
        self._last_received = 0.0
        self._has_noted_silence = False
        self._unacknowledged_since: float | None = None  # the first such heartbeat

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._due

    def tick(self, now: float) -> Sequence[Command | Output]:
        if self._closed or (self._due is not None and now < self._due):
            return ()
        if self._due is None:
            self._due = now + REGISTER_TIMEOUT
            return (Send(self._encoder.registration()),)
        if not self._registered:
            self._closed = True
            return (Close(f"no register_ack within {REGISTER_TIMEOUT:g} s"),)
        return self._heartbeat(now)

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Output]:
        outputs: list[Command | Output] = []
        self._last_received = now
        for data in batch:
            if self._closed:
                break
            try:
                outputs += self._receive_message(data, now)
            except PeerError as error:
                outputs.append(Notice(f"message of the coordinator ignored: {error}"))
        return outputs

    def send(self, message: Event, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case Joined() | OffersChanged() | ReceiptSent() | LoadChanged():
                raise Unsupported("this wire has no such message")
            case CallMessage() | ModelMessage():
                raise Unsupported("this wire carries neither calls nor models")
            case Draining(reason):
                self._draining = reason
                return self._send_draining()
            case HealthReported(health):
                self._jobs.health = health
                return self._heartbeat(now) if self._registered else ()
            case AnswerChunk(job_id, _, pieces):
                return self._collect(job_id, pieces, now)
            case Completed() | Rejected() | Failed():
                running = self._jobs.running.pop(message.job_id, None)
                if running is None:
                    return ()  # cancelled in the meantime
                return self._send_or_keep(
                    self._encoder.completion(running, message, now)
                )

    def _receive_message(self, data: Data, now: float) -> Sequence[Command | Output]:
        message, text = decode_coordinator_message(data)
        match message.type:
            case "register_ack":
                return self._on_registered(message, now)
            case "job_assign":
                return self._on_assignment(text, now)
            case "job_cancel" if self._extended:
                return self._on_cancel(message)
            case "heartbeat_ack":
                self._jobs.acknowledges = True
                self._unacknowledged_since = None
                return ()
            case "error":
                code, text = _quoted(message.code), _quoted(message.message)
                return (Notice(f"the coordinator reports an error, {code}: {text}"),)
            case _:
                return ()  # the document allows for other types

    def _on_registered(
        self, message: CoordinatorMessage, now: float
    ) -> Sequence[Command | Output]:
        if self._registered:
            return ()
        if message.status != "ok":
            self._jobs.refusal = _quoted(message.error)
            self._closed = True
            return (Close(f"refused: {self._jobs.refusal}"),)
        self._registered = True
        self._due = now + HEARTBEAT_INTERVAL
        worker_id = Notice(
            f"registered, worker_id {_quoted(message.worker_id)}", routine=True
        )
        outputs: list[Command | Output] = [worker_id]
        outputs += [Send(text) for text in self._jobs.drain_unsent()]
        if self._extended:
            running, self._jobs.running = self._jobs.running, {}
            outputs += [CancelJob(id_, each.lease) for id_, each in running.items()]
        return [*outputs, *self._send_draining()]

    def _on_assignment(self, text: str, now: float) -> Sequence[Command | Output]:
        message = decode_assignment(text)
        jobs, profile = self._jobs, self._encoder.profile
        try:
            if len(jobs.running) >= JOBS_MAX:
                raise PeerError(f"more than {JOBS_MAX} jobs at a time")
            if not self._extended:  # Shoal's coordinators respect the offer
                check_restrictions(message, profile.only_for, profile.privacy)
            work, lease, text, thoughts = decode_job(
                message, profile.model.name, extended=self._extended
            )
        except PeerError as error:
            return self._refuse(message, str(error), now)
        job_id = jobs.add(
            message.job_id, lease, work.kind, begun_answer(text, thoughts)
        )
        if job_id is None:
            return (
                Notice(
                    f"job {message.job_id!a} was assigned twice: the second is ignored"
                ),
            )
        return (RunJob(job_id, LeaseNumber(lease or 1), work, text, thoughts),)

    def _on_cancel(self, message: CoordinatorMessage) -> Sequence[Command]:
        job_id = JobId(f"{message.job_id}#{message.lease}")
        running = self._jobs.running.pop(job_id, None)
        return () if running is None else (CancelJob(job_id, running.lease),)

    def _refuse(
        self, message: JobAssignment, reason: str, now: float
    ) -> Sequence[Command | Output]:
        notice = Notice(f"job {message.job_id!a} is not run: {reason}")
        lease = LeaseNumber(0)
        if not isinstance(message.shoal, UnsetType):
            lease = LeaseNumber(read_attempt(bytes(message.shoal)).lease)
        running = RunningJob(message.job_id, lease, JobKind.CHAT)
        return (
            notice,
            *self._send_or_keep(self._encoder.rejection(running, reason, now)),
        )

    def _collect(
        self, job_id: JobId, pieces: Sequence[AnswerPiece], now: float
    ) -> Sequence[Output]:
        running = self._jobs.running.get(job_id)
        if running is None:
            return ()  # cancelled in the meantime
        for piece in pieces:
            running.pieces.append(piece)
            running.size += 1 + (len(piece) if isinstance(piece, str) else piece.size)
        if running.size <= ANSWER_MAX:
            return ()
        del self._jobs.running[job_id]  # ignores the rest of the answer
        reason = f"the answer exceeds the limit of {ANSWER_MAX} characters"
        return self._send_or_keep(
            self._encoder.failure(running, reason, Fault.WORKER, now)
        )

    def _heartbeat(self, now: float) -> Sequence[Output]:
        """Send a heartbeat, unless the coordinator is lost.

        A coordinator that acknowledges heartbeats is lost if it stops to, and says
        nothing else either.  Not every one does: then the connection's end tells.
        """
        beat = Send(self._encoder.heartbeat(self._jobs.health))
        since, self._due = self._unacknowledged_since, now + HEARTBEAT_INTERVAL
        if since is None:
            self._unacknowledged_since, self._has_noted_silence = now, False
            return (beat,)
        silent = now - max(since, self._last_received)
        if self._jobs.acknowledges and silent >= ACK_TIMEOUT:
            self._closed = True
            # The next coordinator at this address may be one that never does.
            self._jobs.acknowledges = False
            return (Close(f"no heartbeat_ack within {ACK_TIMEOUT:g} s"),)
        if self._has_noted_silence or now < since + HEARTBEAT_INTERVAL:
            return (beat,)
        self._has_noted_silence = True
        return (beat, Notice("the coordinator has not acknowledged a heartbeat"))

    def _send_or_keep(self, text: str) -> Sequence[Output]:
        if self._registered:
            return (Send(text),)
        self._jobs.keep_unsent(text)
        return ()

    def _send_draining(self) -> Sequence[Output]:
        if self._draining is None or not (self._registered and self._extended):
            return ()  # an original coordinator notices the disconnect
        return (Send(self._encoder.draining(self._draining)),)


def _quoted(text: object) -> str:
    """Return a peer's text, escaped for a terminal."""
    return ascii(text)[1:-1][:REASON_MAX] if isinstance(text, str) else "no reason"
