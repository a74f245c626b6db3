"""The worker's session with a coordinator, and its state across connections."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, Raw, UnsetType

from shoal.domain import vocabulary as words
from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece, plain_texts
from shoal.domain.work import JobKind
from shoal.domain.worker import MachineHealth
from shoal.protocols.dispatch import jobs
from shoal.protocols.dispatch.admission import CAPABILITIES, DEVICES
from shoal.protocols.dispatch.ecmascript_json import to_json
from shoal.protocols.dispatch.jobs import encode_answer, error_output, output_of
from shoal.protocols.dispatch.messages import (
    REASON_MAX,
    CoordinatorMessage,
    MachineMetrics,
    ProviderHeartbeat,
    RegisterProvider,
    decode_coordinator_message,
)
from shoal.protocols.seam.context import Identity, WorkerProfile
from shoal.protocols.seam.session import Batch, Close, Data, Notice, Output, Send

HEARTBEAT_INTERVAL = 10.0  # seconds
REGISTER_TIMEOUT = 10.0  # seconds until register_ack, as for original workers
ACK_TIMEOUT = 30.0  # seconds until a coordinator that acknowledges counts as lost

UNSENT_MAX = 64  # messages kept while the coordinator is unreachable
UNSENT_SIZE_MAX = 16 << 20  # characters of these messages
ANSWER_MAX = 16 << 20  # characters of an answer, as far as collected
JOBS_MAX = 4096  # concurrent jobs accepted from a coordinator

LEASE = LeaseNumber(1)  # of every job: the wire numbers no attempts
TYPES = {device: type_ for type_, device in DEVICES.items()}


@dataclass(slots=True)
class RunningJob:
    """A running job."""

    kind: JobKind
    pieces: list[AnswerPiece] = field(default_factory=list)
    size: int = 0  # approximate number of characters


@dataclass(slots=True)
class WorkerState:
    """A worker's state for one coordinator, across connections.

    It has the jobs that still run when a connection breaks, the messages that are not
    sent yet, and the machine's health.  ``acknowledges``: the coordinator has
    acknowledged a heartbeat, on this connection or on one before it.
    """

    running: dict[JobId, RunningJob] = field(default_factory=dict)
    unsent: deque[str] = field(default_factory=deque)
    unsent_size: int = 0
    health: MachineHealth | None = None
    acknowledges: bool = False
    refusal: str = ""  # the coordinator's reason for refusing this worker

    def keep_unsent(self, message: str) -> None:
        """Keep a message for later; beyond the limits, drop the oldest.

        By then, the coordinator has requeued the jobs of the oldest.
        """
        self.unsent.append(message)
        self.unsent_size += len(message)
        while len(self.unsent) > UNSENT_MAX or self.unsent_size > UNSENT_SIZE_MAX:
            self.unsent_size -= len(self.unsent.popleft())

    def drain_unsent(self) -> list[str]:
        """Return the unsent messages, oldest first, and clear them."""
        unsent = list(self.unsent)
        self.unsent.clear()
        self.unsent_size = 0
        return unsent


class DispatchWorkerSession:
    """Receives jobs from a coordinator and sends complete, signed answers.

    ``state`` outlives the connection: after a reconnect, the coordinator still expects
    the answers.
    """

    # A rejected job hangs at an original coordinator for ever, and a coordinator
    # notices by the disconnect that a worker leaves.
    accepts: frozenset[type] = frozenset(
        {words.AnswerChunk, words.Completed, words.Failed, words.HealthReported}
    )

    def __init__(self, profile: WorkerProfile, state: WorkerState) -> None:
        self._profile = profile
        self._state = state
        self._due: float | None = None
        self._registered = False
        self._closed = False
        self._last_received = 0.0
        self._has_noted_silence = False
        self._unacknowledged_since: float | None = None  # the first such heartbeat

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._due

    def tick(self, now: float) -> Sequence[words.Command | Output]:
        if self._closed or (self._due is not None and now < self._due):
            return ()
        if not self._profile.slots:
            return ()  # it must get no jobs, and a registration cannot say that
        if self._due is None:
            self._due = now + REGISTER_TIMEOUT
            return (Send(self._registration()),)
        if not self._registered:
            self._closed = True
            return (Close(f"no register_ack within {REGISTER_TIMEOUT:g} s"),)
        return self._heartbeat(now)

    def receive(self, batch: Batch, now: float) -> Sequence[words.Command | Output]:
        outputs: list[words.Command | Output] = []
        self._last_received = now
        for data in batch:
            if self._closed:
                break
            try:
                outputs += self._receive_message(data, now)
            except PeerError as error:
                outputs.append(Notice(f"message of the coordinator ignored: {error}"))
        return outputs

    def send(self, message: words.Event, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case (
                words.Joined()
                | words.OffersChanged()
                | words.LoadChanged()
                | words.Draining()
                | words.Rejected()
                | words.ReceiptSent()
                | words.CallMessage()
                | ModelMessage()
            ):
                raise Unsupported("this protocol has no such message")
            case words.HealthReported(health):
                self._state.health = health
                return self._heartbeat(now) if self._registered else ()
            case words.AnswerChunk(job_id, _, pieces):
                return self._collect(job_id, pieces, now)
            case words.Completed(job_id):
                running = self._state.running.pop(job_id, None)
                if running is None:
                    return ()  # it failed in the meantime
                return self._complete(job_id, running, message, now)
            case words.Failed(job_id, _, error):
                if self._state.running.pop(job_id, None) is None:
                    return ()
                return self._fail(job_id, error, now)

    def _receive_message(
        self, data: Data, now: float
    ) -> Sequence[words.Command | Output]:
        message, text = decode_coordinator_message(data)
        match message.type:
            case "register_ack":
                return self._on_registered(message, now)
            case "job_assign":
                return self._on_assignment(text, now)
            case "heartbeat_ack":
                self._state.acknowledges = True
                self._unacknowledged_since = None
                return ()
            case "error":
                code, text = _quoted(message.code), _quoted(message.message)
                return (Notice(f"the coordinator reports an error, {code}: {text}"),)
            case _:
                return ()  # the document allows for other types

    def _on_registered(
        self, message: CoordinatorMessage, now: float
    ) -> Sequence[words.Command | Output]:
        if self._registered:
            return ()
        if message.status != "ok":
            self._state.refusal = _quoted(message.error)
            self._closed = True
            return (Close(f"refused: {self._state.refusal}"),)
        self._registered = True
        self._due = now + HEARTBEAT_INTERVAL
        worker_id = _quoted(message.worker_id)
        unsent = [Send(text) for text in self._state.drain_unsent()]
        return (Notice(f"registered, worker_id {worker_id}", routine=True), *unsent)

    def _on_assignment(self, text: str, now: float) -> Sequence[words.Command | Output]:
        message = jobs.decode_assignment(text)
        running, profile = self._state.running, self._profile
        job_id = JobId(message.job_id)
        try:
            if len(running) >= JOBS_MAX:
                raise PeerError(f"more than {JOBS_MAX} jobs at a time")
            jobs.check_restrictions(message, profile.only_for, profile.privacy)
            work = jobs.decode_job(message, profile.model.name)
        except PeerError as error:
            notice = Notice(f"job {job_id!a} is not run: {error}")
            return (notice, *self._fail(job_id, str(error), now))
        if job_id in running:
            return (
                Notice(f"job {job_id!a} was assigned twice: the second is ignored"),
            )
        running[job_id] = RunningJob(work.kind)
        return (words.RunJob(job_id, LEASE, work),)

    def _collect(
        self, job_id: JobId, pieces: Sequence[AnswerPiece], now: float
    ) -> Sequence[Output]:
        running = self._state.running.get(job_id)
        if running is None:
            return ()  # it failed in the meantime
        for piece in pieces:
            running.pieces.append(piece)
            running.size += 1 + (len(piece) if isinstance(piece, str) else piece.size)
        if running.size <= ANSWER_MAX:
            return ()
        del self._state.running[job_id]  # ignores the rest of the answer
        reason = f"the answer exceeds the limit of {ANSWER_MAX} characters"
        return self._fail(job_id, reason, now)

    def _complete(
        self, job_id: JobId, running: RunningJob, done: words.Completed, now: float
    ) -> Sequence[Output]:
        text = "".join(plain_texts([*running.pieces, *done.rest]))
        try:
            output = output_of(running.kind, self._profile.model.name, text)
            return self._answer(job_id, output, now)
        except PeerError as error:
            return self._fail(job_id, str(error), now)

    def _fail(self, job_id: JobId, reason: str, now: float) -> Sequence[Output]:
        """End a job with an output, as original workers do."""
        return self._answer(job_id, error_output(reason), now)

    def _answer(self, job_id: JobId, output: bytes, now: float) -> Sequence[Output]:
        at = now + self._profile.epoch
        text = encode_answer(job_id, output, self._identity, at)
        if self._registered:
            return (Send(text),)
        self._state.keep_unsent(text)
        return ()

    def _heartbeat(self, now: float) -> Sequence[Output]:
        """Send a heartbeat, unless the coordinator is lost.

        A coordinator that acknowledges heartbeats is lost if it stops to, and says
        nothing else either.  Not every one does: then the connection's end shows it.
        """
        beat = Send(self._encoded_heartbeat())
        since, self._due = self._unacknowledged_since, now + HEARTBEAT_INTERVAL
        if since is None:
            self._unacknowledged_since, self._has_noted_silence = now, False
            return (beat,)
        silent = now - max(since, self._last_received)
        if self._state.acknowledges and silent >= ACK_TIMEOUT:
            self._closed = True
            # The next coordinator at this address may be one that never does.
            self._state.acknowledges = False
            return (Close(f"no heartbeat_ack within {ACK_TIMEOUT:g} s"),)
        if self._has_noted_silence or now < since + HEARTBEAT_INTERVAL:
            return (beat,)
        self._has_noted_silence = True
        return (beat, Notice("the coordinator has not acknowledged a heartbeat"))

    @property
    def _identity(self) -> Identity:
        """The key that signs the worker's answers."""
        assert self._profile.identity is not None, "answers are signed in this protocol"
        return self._profile.identity

    def _registration(self) -> str:
        profile = self._profile
        kinds = profile.model.kinds - {JobKind.TASK}
        if profile.tasks:
            kinds |= {JobKind.TASK}
        return to_json(
            RegisterProvider(
                self._identity.public_key.hex(),
                TYPES[profile.device],
                [name for name, kind in CAPABILITIES.items() if kind in kinds],
                profile.price or UNSET,
            )
        )

    def _encoded_heartbeat(self) -> str:
        health = self._state.health
        metrics: Raw | UnsetType = UNSET
        if health is not None:
            measured = MachineMetrics(health.cpu, health.memory, health.jobs)
            metrics = Raw(to_json(measured))
        return to_json(ProviderHeartbeat(self._identity.public_key.hex(), metrics))


def _quoted(text: object) -> str:
    """Return a peer's text, escaped for a terminal."""
    return ascii(text)[1:-1][:REASON_MAX] if isinstance(text, str) else "no reason"
