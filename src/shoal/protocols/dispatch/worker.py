"""The worker's end of a connection to a coordinator, ours or an original one."""

from collections.abc import Sequence

from msgspec import UnsetType

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault, Piece
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    CallWord,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Draining,
    Event,
    Failed,
    Joined,
    Offered,
    Presented,
    Progress,
    Rejected,
    Reported,
    RunJob,
)
from shoal.domain.work import Kind
from shoal.protocols.dispatch.desk import ANSWER_MAX, JOBS_MAX, Desk, Running
from shoal.protocols.dispatch.extension import read_attempt
from shoal.protocols.dispatch.jobs import Assigned, decode_assigned, decode_job
from shoal.protocols.dispatch.messages import REASON_MAX, Told, decode_told
from shoal.protocols.dispatch.voice import Voice
from shoal.protocols.session import Batch, Close, Data, Notice, Output, Send

HEARTBEAT = 10.0  # seconds
REGISTER_LIMIT = 10.0  # seconds for the coordinator to answer; original workers wait so


class CoordinatorLink:
    """Takes jobs from a coordinator and answers them, whole and signed.

    ``desk`` outlives the connection.  An original coordinator goes on as if nothing had
    been; one of ours has given the jobs to others, so what still runs is cancelled
    there, after what was finished meanwhile has been presented.
    """

    def __init__(self, voice: Voice, desk: Desk) -> None:
        extended = voice.extended
        # What is rejected hangs for ever at an original coordinator.
        self.accepts: frozenset[type] = frozenset(
            {Progress, Completed, Failed, Draining, Reported}
            | ({Rejected} if extended else set())
        )
        self._extended = extended
        self._voice = voice
        self._desk = desk
        self._due: float | None = None
        self._registered = False
        self._closed = False
        self._draining: str | None = None

    @property
    def deadline(self) -> float | None:
        return None if self._closed else self._due

    def tick(self, now: float) -> Sequence[Command | Output]:
        if self._closed or (self._due is not None and now < self._due):
            return ()
        if self._due is None:
            self._due = now + REGISTER_LIMIT
            return (Send(self._voice.registration()),)
        if not self._registered:
            self._closed = True
            return (Close(f"no register_ack within {REGISTER_LIMIT:g} s"),)
        return (self._beat(now),)

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Output]:
        outputs: list[Command | Output] = []
        for data in batch:
            if self._closed:
                break
            try:
                outputs += self._take(data, now)
            except PeerError as error:
                outputs.append(Notice(f"message of the coordinator ignored: {error}"))
        return outputs

    def issue(self, message: Event, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        match message:
            case Joined() | Offered() | Presented() | Conditioned():
                raise Unsupported("this wire has no words for it")
            case CallWord() | ModelWord():
                raise Unsupported("this wire carries neither calls nor models")
            case Draining(reason):
                self._draining = reason
                return self._say_draining()
            case Reported(health):
                self._desk.health = health
                return (self._beat(now),) if self._registered else ()
            case Progress(job_id, _, pieces):
                return self._collect(job_id, pieces, now)
            case Completed() | Rejected() | Failed():
                running = self._desk.running.pop(message.job_id, None)
                if running is None:
                    return ()  # cancelled meanwhile
                return self._say(self._voice.ended(running, message, now))

    def _take(self, data: Data, now: float) -> Sequence[Command | Output]:
        told, text = decode_told(data)
        match told.type:
            case "register_ack":
                return self._acknowledged(told, now)
            case "job_assign":
                return self._assign(text, now)
            case "job_cancel" if self._extended:
                return self._cancel(told)
            case "error":
                return (Notice(f"the coordinator says: {_shown(told.message)}"),)
            case _:
                return ()  # the document: others may be added

    def _acknowledged(self, told: Told, now: float) -> Sequence[Command | Output]:
        if self._registered:
            return ()
        if told.status != "ok":
            self._desk.refusal = _shown(told.error)
            self._closed = True
            return (Close(f"refused: {self._desk.refusal}"),)
        self._registered = True
        self._due = now + HEARTBEAT
        outputs: list[Command | Output] = []
        outputs += [Send(text) for text in self._desk.say_kept()]
        if self._extended:
            running, self._desk.running = self._desk.running, {}
            outputs += [CancelJob(id_, each.lease) for id_, each in running.items()]
        return [*outputs, *self._say_draining()]

    def _assign(self, text: str, now: float) -> Sequence[Command | Output]:
        message = decode_assigned(text)
        desk, model = self._desk, self._voice.member.model.name
        try:
            if len(desk.running) >= JOBS_MAX:
                raise PeerError(f"more than {JOBS_MAX} jobs at a time")
            work, lease, continues = decode_job(message, model, extended=self._extended)
        except PeerError as error:
            return self._refuse(message, str(error), now)
        job_id = desk.take(message.job_id, lease, work.kind, continues)
        if job_id is None:
            return (Notice(f"job {message.job_id!a} came twice: one is ignored"),)
        return (RunJob(job_id, LeaseNumber(lease or 1), work, continues),)

    def _cancel(self, told: Told) -> Sequence[Command]:
        job_id = JobId(f"{told.job_id}#{told.lease}")
        running = self._desk.running.pop(job_id, None)
        return () if running is None else (CancelJob(job_id, running.lease),)

    def _refuse(
        self, message: Assigned, why: str, now: float
    ) -> Sequence[Command | Output]:
        notice = Notice(f"job {message.job_id!a} is not done: {why}")
        lease = LeaseNumber(0)
        if not isinstance(message.shoal, UnsetType):
            lease = LeaseNumber(read_attempt(bytes(message.shoal)).lease)
        running = Running(message.job_id, lease, Kind.CHAT)
        return (notice, *self._say(self._voice.refusal(running, why, now)))

    def _collect(
        self, job_id: JobId, pieces: Sequence[Piece], now: float
    ) -> Sequence[Output]:
        running = self._desk.running.get(job_id)
        if running is None:
            return ()  # cancelled meanwhile
        for piece in pieces:
            running.pieces.append(piece)
            running.size += 1 + (len(piece) if isinstance(piece, str) else piece.size)
        if running.size <= ANSWER_MAX:
            return ()
        del self._desk.running[job_id]  # the rest of it is not heard
        why = f"the answer exceeds the limit of {ANSWER_MAX} characters"
        return self._say(self._voice.failure(running, why, Fault.WORKER, now))

    def _beat(self, now: float) -> Send:
        self._due = now + HEARTBEAT
        return Send(self._voice.heartbeat(self._desk.health))

    def _say(self, text: str) -> Sequence[Output]:
        if self._registered:
            return (Send(text),)
        self._desk.keep(text)
        return ()

    def _say_draining(self) -> Sequence[Output]:
        if self._draining is None or not (self._registered and self._extended):
            return ()  # an original coordinator finds out when the connection ends
        return (Send(self._voice.draining(self._draining)),)


def _shown(said: object) -> str:
    """Return a peer's words as a terminal may be shown them."""
    return ascii(said)[1:-1][:REASON_MAX] if isinstance(said, str) else "no reason"
