"""The worker's end of a wire on which all peers are alike.

A worker accepts jobs from any peer that may submit them and submits none itself.  It
therefore ignores what peers offer, and treats jobs alike, whichever peer they are from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeAlias

from shoal.domain.ids import JobId
from shoal.domain.model_messages import ModelMessage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CallMessage,
    CallProgress,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Draining,
    Event,
    Failed,
    HealthReported,
    Joined,
    LoadChanged,
    OffersChanged,
    PushCalls,
    ReceiptSent,
    Rejected,
    RunJob,
    SendBlob,
)
from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.multi_peer import (
    ALL_PEERS,
    MultiPeerSession,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import (
    Admitted,
    Batch,
    Bulk,
    Close,
    HandlesConnectionLoss,
    Notice,
    Output,
    Send,
)

JOBS_MAX = 4096  # that peers may have at a worker at a time

_EVENTS = frozenset(
    {
        OffersChanged,
        LoadChanged,
        Draining,
        HealthReported,
        AnswerChunk,
        Completed,
        Rejected,
        Failed,
    }
)


@dataclass(slots=True)
class PeerJob:
    """A job that a worker has: which peer's, and as the peer asked for it."""

    peer: str
    request: RunJob


@dataclass(slots=True)
class AcceptedJobs:
    """A worker's jobs, across its connections to one coordinator.

    No two have the same name, whatever their peers call them.
    """

    held: dict[JobId, PeerJob] = field(default_factory=dict)
    _named: dict[tuple[str, JobId, int], JobId] = field(default_factory=dict)
    _count: int = 0

    def add(self, peer: str, asked: RunJob) -> JobId | None:
        """Note a job; return our name for it, or None if the peer has it here."""
        theirs = (peer, asked.job_id, asked.lease)
        if theirs in self._named:
            return None
        self._count += 1
        job_id = JobId(f"{asked.job_id}#{self._count}")
        self._named[theirs] = job_id
        self.held[job_id] = PeerJob(peer, asked)
        return job_id

    def find(
        self, peer: str, word: CancelJob | PushCalls | CancelCalls
    ) -> JobId | None:
        """Return our name for what a peer speaks of."""
        return self._named.get((peer, word.job_id, word.lease))

    def remove(self, job_id: JobId) -> None:
        """Forget a job that is over."""
        held = self.held.pop(job_id)
        del self._named[held.peer, held.request.job_id, held.request.lease]

    def of_peer(self, peer: str) -> list[JobId]:
        """Return the jobs of a peer."""
        return [job_id for job_id, each in self.held.items() if each.peer == peer]


@dataclass(slots=True)
class MembershipState:
    """What a worker's connections to one coordinator have in common.

    ``welcome`` says whether somebody has let it in, and ``refusal`` why nobody will.
    """

    jobs: AcceptedJobs = field(default_factory=AcceptedJobs)
    admitted: bool = False
    refusal: str = ""


AboutJob: TypeAlias = AnswerChunk | Completed | Rejected | Failed


class MultiPeerWorkerSession:
    """Puts a worker where a session with many peers wants one that hears them all.

    Args:
        begin: makes the session, given the time; ``accepts`` is what that will take.
        stay: outlives the connection.  What ran when it broke has been given to others
            by then, so that the next one begins by cancelling it.
    """

    def __init__(
        self,
        begin: Callable[[float], MultiPeerSession],
        accepts: frozenset[type],
        stay: MembershipState,
    ) -> None:
        self._begin = begin
        self._inner: MultiPeerSession | None = None
        self._stay = stay
        self._jobs = stay.jobs
        words = {
            each for each in accepts if issubclass(each, ModelMessage | CallMessage)
        }
        self.accepts: frozenset[type] = (_EVENTS & accepts) | words

    @property
    def deadline(self) -> float | None:
        return None if self._inner is None else self._inner.deadline

    def tick(self, now: float) -> Sequence[Command | Admitted | Output]:
        left: list[Command] = []
        if self._inner is None:
            self._inner = self._begin(now)
            left = [self._cancel(job_id) for job_id in [*self._jobs.held]]
        return [*left, *self.translate(self._inner.tick(now), now)]

    def receive(
        self, batch: Batch, now: float
    ) -> Sequence[Command | Admitted | Output]:
        assert self._inner is not None, "a session is ticked before it hears anything"
        return self.translate(self._inner.receive(batch, now), now)

    def send(self, message: Event, now: float) -> Sequence[Output]:
        if self._inner is None:
            return ()
        match message:
            case AnswerChunk() | Completed() | Rejected() | Failed():
                held = self._jobs.held.get(message.job_id)
                if held is None:
                    return ()  # cancelled meanwhile
                if not isinstance(message, AnswerChunk):
                    self._jobs.remove(message.job_id)
                said = self._inner.send(ToPeer(held.peer, _renamed(message, held)), now)
            case (
                OffersChanged()
                | LoadChanged()
                | Draining()
                | HealthReported()
                | ModelMessage()
            ):
                said = self._inner.send(ToPeer(ALL_PEERS, message), now)
            case CallMessage():
                said = self._send_call_event(message, now)
            case Joined() | ReceiptSent():
                raise AssertionError("nobody is told so on such a wire")
        return said

    def translate(
        self, outputs: Sequence[PeerMessage | Output], now: float
    ) -> list[Command | Admitted | Output]:
        """Return what it means to the worker that peers say so."""
        heard = [
            *chain.from_iterable(self._translate_one(each, now) for each in outputs)
        ]
        refusal = self._stay.refusal
        if refusal and not any(isinstance(each, Close) for each in heard):
            heard.append(Close(refusal))
        return heard

    def _translate_one(
        self, output: PeerMessage | Output, now: float
    ) -> Sequence[Command | Admitted | Output]:
        match output:
            case PeerMessage(peer, RunJob() as asked):
                return self._start_job(peer, asked, now)
            case PeerMessage(peer, CancelJob() as word):
                job_id = self._jobs.find(peer, word)
                return () if job_id is None else (self._cancel(job_id),)
            case PeerMessage(peer, PeerLeft()):
                return [self._cancel(job_id) for job_id in self._jobs.of_peer(peer)]
            case PeerMessage(peer, PushCalls() | CancelCalls() as word):
                return self._call_stream_command(peer, word)
            case PeerMessage(_, Dismiss() | SendBlob() | ModelMessage() as word):
                return (word,)
            case PeerMessage(_, PeerJoined()):
                self._stay.admitted = True
                return (Admitted(),)
            case PeerMessage():
                return ()  # what a peer offers
            case Send() | Bulk() | Close() | Notice():
                return (output,)

    def _send_call_event(self, word: CallMessage, now: float) -> Sequence[Output]:
        assert self._inner is not None, "it has said what this is about"
        match word:
            case CallProgress() | CallsReturned():
                held = self._jobs.held.get(word.job_id)
                if held is None:
                    return ()  # cancelled meanwhile
                named = replace(
                    word, job_id=held.request.job_id, lease=held.request.lease
                )
                return self._inner.send(ToPeer(held.peer, named), now)
            case _:
                return self._inner.send(ToPeer(ALL_PEERS, word), now)

    def _call_stream_command(
        self, peer: str, word: PushCalls | CancelCalls
    ) -> Sequence[Command | Output]:
        job_id = self._jobs.find(peer, word)
        return () if job_id is None else (replace(word, job_id=job_id),)

    def _start_job(
        self, peer: str, asked: RunJob, now: float
    ) -> Sequence[Command | Output]:
        if len(self._jobs.held) >= JOBS_MAX:
            why = f"{JOBS_MAX} jobs are there already"
            rejected = Rejected(asked.job_id, asked.lease, why)
            assert self._inner is not None, "it has just said so"
            return self._inner.send(ToPeer(peer, rejected), now)
        job_id = self._jobs.add(peer, asked)
        if job_id is None:
            return (Notice(f"job {asked.job_id!a} came twice: one is ignored"),)
        return (replace(asked, job_id=job_id),)

    def _cancel(self, job_id: JobId) -> CancelJob:
        lease = self._jobs.held[job_id].request.lease
        self._jobs.remove(job_id)
        return CancelJob(job_id, lease)


def _renamed(event: AboutJob, held: PeerJob) -> AboutJob:
    """Return an event under the name that the job has with its peer."""
    job_id = held.request.job_id
    if isinstance(event, AnswerChunk):
        return AnswerChunk(job_id, event.lease, event.pieces)  # one for each token
    return replace(event, job_id=job_id)


class FramedMultiPeerSession(
    FramedSession[PeerMessage], HandlesConnectionLoss, Protocol
):
    """A session with peers, as it is on a byte stream whose messages a link cuts."""


class FramedWorkerSession:
    """Cuts messages for the session that ``worker`` begins.

    That has to be there before the time is known, for a link asks it first.
    """

    def __init__(
        self, worker: MultiPeerWorkerSession, framed: FramedMultiPeerSession
    ) -> None:
        self._worker = worker
        self._framed = framed
        self.accepts = worker.accepts
        self.head_size = framed.head_size
        self.body_size = framed.body_size
        self.buffer_for = framed.buffer_for
        self.checksum = framed.checksum
        self.on_open = framed.on_open
        self.connection_lost = framed.connection_lost

    @property
    def deadline(self) -> float | None:
        return self._worker.deadline

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Command | Admitted | Output]:
        return self._worker.translate(self._framed.receive_messages(messages, now), now)

    def receive(
        self, batch: Batch, now: float
    ) -> Sequence[Command | Admitted | Output]:
        return self._worker.receive(batch, now)

    def send(self, message: Event, now: float) -> Sequence[Output]:
        return self._worker.send(message, now)

    def tick(self, now: float) -> Sequence[Command | Admitted | Output]:
        return self._worker.tick(now)
