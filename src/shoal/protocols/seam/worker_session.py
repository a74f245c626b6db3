"""The worker's end of a wire on which all peers have the same role.

A worker accepts jobs from any peer that may submit jobs, and submits none itself.  It
therefore ignores offers of peers, and treats jobs of all peers alike.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec.structs import replace

from shoal.domain import vocabulary as words
from shoal.domain.answer_assembly import pieces_after
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelMessage
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import CallStream
from shoal.protocols.seam import session
from shoal.protocols.seam.context import unenforceable
from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.streamed_calls import CallPlace, StreamedCalls

JOBS_MAX = 4096  # open jobs per worker, for all peers
KEPT_SECONDS = 60.0  # seconds for which the answer of an ended job is kept
KEPT_MAX = 256  # jobs that a worker names to a coordinator to which it comes back
KEPT_SIZE = 8 << 20  # bytes, about: of one answer, and of all that have ended
PIECE_COST = 64  # bytes that a piece takes beside its text
GIVEN_WITHIN = 10.0  # seconds from an admission for a job to be given again
NOT_KEPT = "this worker no longer runs it"

_EVENTS = frozenset(
    {
        words.OffersChanged,
        words.LoadChanged,
        words.Draining,
        words.HealthReported,
        words.AnswerChunk,
        words.Completed,
        words.Rejected,
        words.Failed,
    }
)


@dataclass(slots=True)
class PeerJob:
    """A job of a worker: its peer, and the peer's request.

    ``sent`` are the pieces after the beginning in the request, of about ``size`` bytes;
    None: it is not kept when the connection is lost.  ``end`` is how it ended, without
    pieces.  ``attached``: the present connection has given it.
    """

    peer: str
    request: words.RunJob
    sent: list[AnswerPiece] | None = None
    size: int = 0
    end: words.Completed | words.Failed | None = None
    ended_at: float = 0.0
    attached: bool = True

    @property
    def name(self) -> tuple[JobId, LeaseNumber]:
        """How its coordinator knows it."""
        return self.request.job_id, self.request.lease

    def record(self, pieces: Sequence[AnswerPiece]) -> None:
        """Record pieces of the answer, as long as they are not too many."""
        if self.sent is None:
            return
        self.sent += pieces
        for piece in pieces:
            self.size += PIECE_COST + (
                len(piece) if isinstance(piece, str) else piece.size
            )
        if self.size > KEPT_SIZE:
            self.sent = None

    def resume(self, request: words.RunJob) -> bool:
        """Go on under another lease, after its beginning; return whether it can."""
        if self.sent is None:
            return False
        whole = [*self.request.beginning, *self.sent]
        rest = pieces_after(whole, request.beginning)
        if rest is None:
            return False
        self.request, self.sent, self.attached = request, rest, True
        return True


@dataclass(slots=True)
class AcceptedJobs:
    """A worker's jobs, across its connections to one coordinator.

    Each has a unique id on the worker, even if peers use the same id.  If ``keeps``,
    their answers are recorded, so that a coordinator may take them up again after the
    connection was lost; also those that have ended, for a while.  ``calls`` are those
    of call streams then.  An ``orphan`` is a stream that its coordinator has lost, or
    given to another worker, and whose calls are still named.
    """

    running: dict[JobId, PeerJob] = field(default_factory=dict)
    keeps: bool = False
    calls: StreamedCalls = field(default_factory=StreamedCalls)
    orphans: set[JobId] = field(default_factory=set)
    _ids: dict[tuple[str, JobId, int], JobId] = field(default_factory=dict)
    _ended: dict[tuple[JobId, LeaseNumber], PeerJob] = field(default_factory=dict)
    _ended_size: int = 0
    _count: int = 0

    def add(self, peer: str, request: words.RunJob) -> JobId | None:
        """Add a job; return its id on the worker, or None for a duplicate."""
        key = (peer, request.job_id, request.lease)
        if key in self._ids:
            return None
        self._count += 1
        job_id = JobId(f"{request.job_id}#{self._count}")
        self._ids[key] = job_id
        self.running[job_id] = PeerJob(peer, request, [] if self.keeps else None)
        if self.keeps and isinstance(request.work, CallStream):
            self.calls.open(job_id)
        return job_id

    def detach(self, now: float) -> list[JobId]:
        """Expect the jobs to be given again; return those that cannot be."""
        self._drop_ended(now)
        room = KEPT_MAX - len(self._ended)
        lost: list[JobId] = []
        for job_id, job in self.running.items():
            job.attached = False
            if job.sent is None or room <= 0:
                lost.append(job_id)
            else:
                room -= 1
        return lost

    @property
    def names(self) -> words.RunningJobNames:
        """The jobs that a coordinator may give again, by the names that it knows."""
        running = (
            each.name
            for job_id, each in self.running.items()
            if not each.attached and job_id not in self.orphans
        )
        return (*running, *self._ended, *self.calls.names)

    @property
    def unattached(self) -> list[JobId]:
        """The jobs that run, and were not given again so far."""
        return [job_id for job_id, each in self.running.items() if not each.attached]

    def resume_ended(self, request: words.RunJob) -> PeerJob | None:
        """Return a job that has ended, under another lease; None: it is not kept."""
        name = (request.job_id, request.resumes)
        if (ended := self._ended.get(name)) is None:
            return None
        self._forget_ended(name)
        if not ended.resume(request):
            return None
        self.keep_ended(ended)
        return ended

    def resume(self, peer: str, request: words.RunJob) -> JobId | None:
        """Go on with a job under another lease; None: it does not run here."""
        key = (peer, request.job_id, request.resumes)
        job_id = self._ids.get(key)
        if job_id is None or not self.running[job_id].resume(request):
            return None
        del self._ids[key]
        self._ids[peer, request.job_id, request.lease] = job_id
        if isinstance(request.work, CallStream):
            self.calls.repeat(job_id)
        return job_id

    def end(
        self,
        job_id: JobId,
        event: words.Completed | words.Rejected | words.Failed,
        now: float,
    ) -> None:
        """Remove a job that ended; keep its answer for a while."""
        job = self.running[job_id]
        self.remove(job_id)
        is_stream = isinstance(job.request.work, CallStream)
        if job.sent is None or is_stream or isinstance(event, words.Rejected):
            return
        if isinstance(event, words.Completed) and event.rest:
            job.record(event.rest)
            event = replace(event, rest=())
        if isinstance(event, words.Completed):
            job.size += len(event.value)
        job.end, job.ended_at = event, now
        self.keep_ended(job)
        self._drop_ended(now)

    def keep_ended(self, job: PeerJob) -> None:
        """Keep the answer of a job that has ended, which may be lost on its way."""
        if job.sent is not None:
            self._ended[job.name] = job
            self._ended_size += job.size

    def forget_ended(self, job_id: JobId, lease: LeaseNumber) -> None:
        """Drop the answer of a job that its coordinator does not need."""
        if (job_id, lease) in self._ended:
            self._forget_ended((job_id, lease))

    def _forget_ended(self, name: tuple[JobId, LeaseNumber]) -> None:
        self._ended_size -= self._ended.pop(name).size

    def _drop_ended(self, now: float) -> None:
        """Drop what is kept for too long, and the oldest of too much."""
        while self._ended:
            name, oldest = next(iter(self._ended.items()))
            too_many = len(self._ended) > KEPT_MAX or self._ended_size > KEPT_SIZE
            if not too_many and now - oldest.ended_at < KEPT_SECONDS:
                return
            self._forget_ended(name)

    def find(
        self, peer: str, message: words.CancelJob | words.PushCalls | words.CancelCalls
    ) -> JobId | None:
        """Return the worker's id of the job that a peer's message is about."""
        return self._ids.get((peer, message.job_id, message.lease))

    def remove(self, job_id: JobId) -> None:
        """Remove a job that ended."""
        job = self.running.pop(job_id)
        del self._ids[job.peer, job.request.job_id, job.request.lease]
        self.calls.close(job_id)
        self.orphans.discard(job_id)

    def of_peer(self, peer: str) -> list[JobId]:
        """Return the jobs of a peer."""
        return [job_id for job_id, each in self.running.items() if each.peer == peer]


@dataclass(slots=True)
class MembershipState:
    """State that a worker's connections to one coordinator share.

    ``admitted`` says whether a peer admitted the worker, and ``refusal`` why none will.
    ``restriction`` is as in ``WorkerProfile``; ``declined`` is why this worker does not
    serve the coordinator, which cannot enforce it.  ``peer_name`` is the name of the
    last peer that admitted it.
    """

    jobs: AcceptedJobs = field(default_factory=AcceptedJobs)
    admitted: bool = False
    refusal: str = ""
    restriction: str = ""
    declined: str = ""
    peer_name: str = ""

    def final_reason(self, options: str) -> str | None:
        """Return why this worker is not served, and what to check; None: it may be."""
        if self.declined or not self.refusal:
            return self.declined or None
        refused = f"the coordinator refuses this worker: {self.refusal}"
        # Most refusals name the option to change, or the command to give.
        names_remedy = "--" in refused or "`" in refused
        return refused if names_remedy else f"{refused}: check {options}"


AboutJob: TypeAlias = (
    words.AnswerChunk | words.Completed | words.Rejected | words.Failed
)


class WorkerSession:
    """Adapts a session with many peers to a worker.

    Args:
        new_session: takes the time and creates the session.
        accepts: the messages that this session accepts.
        state: outlives the connection.  Jobs of a broken connection have been
            reassigned, so the next connection starts by cancelling them: all but those
            that it ``keeps``, which the coordinator may give again.
        on_relay: other peers of a relay can submit jobs as well.  A job of a peer that
            does not respect the worker's offers is rejected; on other connections, the
            worker does not serve such a peer at all.
    """

    def __init__(
        self,
        new_session: Callable[[float], PeerSession],
        accepts: frozenset[type],
        state: MembershipState,
        *,
        on_relay: bool = False,
    ) -> None:
        self._new_session = new_session
        self._inner: PeerSession | None = None
        self._binding = b""
        self._state = state
        self._jobs = state.jobs
        self._on_relay = on_relay
        self._given_until: float | None = None  # what is not, is cancelled
        self._over: list[JobId] = []  # streams of which no call is left
        self._respectful: set[str] = set()  # peers that respect the offers
        forwarded = {
            each
            for each in accepts
            if issubclass(each, ModelMessage | words.CallMessage)
        }
        self.accepts: frozenset[type] = (_EVENTS & accepts) | forwarded

    def bind(self, binding: bytes) -> None:
        """Record the binding of the encrypted connection."""
        self._binding = binding

    @property
    def deadline(self) -> float | None:
        if self._inner is None:
            return None
        due, until = self._inner.deadline, self._given_until
        if self._over:
            return -math.inf
        if until is None:
            return due
        return until if due is None else min(due, until)

    def tick(
        self, now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        left: list[words.Command] = []
        if self._inner is None:
            left = [self._cancel(job_id) for job_id in self._jobs.detach(now)]
            left += self._recall(self._jobs.calls.detach(now))
            self._inner = self._new_session(now)
            if self._binding and isinstance(self._inner, session.BoundSession):
                self._inner.bind(self._binding)
        elif self._given_until is not None and now >= self._given_until:
            self._given_until = None
            for job_id in self._jobs.unattached:
                if isinstance(self._jobs.running[job_id].request.work, CallStream):
                    self._jobs.orphans.add(job_id)
                    not_given = self._jobs.calls.not_given(job_id)
                    left += self._stop_calls(job_id, not_given)
                else:
                    left.append(self._cancel(job_id))
        over, self._over = self._over, []
        left += [self._cancel(each) for each in over if each in self._jobs.orphans]
        return [*left, *self.translate(self._inner.tick(now), now)]

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        assert self._inner is not None, "a session is ticked before it receives data"
        return self.translate(self._inner.receive(batch, now), now)

    def send(self, message: words.Event, now: float) -> Sequence[session.Output]:
        if self._inner is None:
            return ()
        match message:
            case (
                words.AnswerChunk()
                | words.Completed()
                | words.Rejected()
                | words.Failed()
            ):
                job = self._jobs.running.get(message.job_id)
                if job is None:
                    return ()  # cancelled meanwhile
                given: Sequence[words.CallName] = ()
                if isinstance(message, words.Rejected):
                    given = self._jobs.calls.given(message.job_id)
                if not isinstance(message, words.AnswerChunk):
                    self._jobs.end(message.job_id, message, now)
                elif job.sent is not None:
                    job.record(message.pieces)
                if not job.attached:  # until its coordinator gives it again
                    refused = (words.Rejected(*each, NOT_KEPT) for each in given)
                    return self._send_all(job.peer, refused, now)
                outputs = self._inner.send(
                    ToPeer(job.peer, _with_peer_job_id(message, job)), now
                )
            case (
                words.OffersChanged()
                | words.LoadChanged()
                | words.Draining()
                | words.HealthReported()
                | ModelMessage()
            ):
                outputs = self._inner.send(ToPeer(ALL_PEERS, message), now)
            case words.CallMessage():
                outputs = self._send_call_event(message, now)
            case words.Joined() | words.ReceiptSent():
                raise AssertionError("such a wire does not carry this event")
        return outputs

    def translate(
        self, outputs: Sequence[PeerMessage | session.Output], now: float
    ) -> list[words.Command | session.Admitted | session.Output]:
        """Translate outputs of the inner session for the worker."""
        translated: list[words.Command | session.Admitted | session.Output] = []
        for output in outputs:
            translated += self._translate_one(output, now)
        refusal = self._state.declined or self._state.refusal
        if refusal and not any(isinstance(each, session.Close) for each in translated):
            translated.append(session.Close(refusal))
        return translated

    def _translate_one(
        self, output: PeerMessage | session.Output, now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        match output:
            case PeerMessage(peer, words.RunJob() as request):
                if request.resumes:
                    return self._resume_job(peer, request, now)
                return self._start_job(peer, request, now)
            case PeerMessage(peer, words.CancelJob() as message):
                return self._cancel_of_peer(peer, message)
            case PeerMessage(peer, PeerLeft()):
                self._respectful.discard(peer)
                return [self._cancel(job_id) for job_id in self._jobs.of_peer(peer)]
            case PeerMessage(peer, words.PushCalls() | words.CancelCalls() as message):
                return self._call_stream_command(peer, message, now)
            case PeerMessage(
                _,
                words.Dismiss()
                | words.WakeMachine()
                | words.SendBlob()
                | ModelMessage() as message,
            ):
                return (message,)
            case PeerMessage(peer, PeerJoined() as joined):
                self._given_until = (
                    now + GIVEN_WITHIN if self._jobs.unattached else None
                )
                return self._on_joined(peer, joined)
            case PeerMessage(_, PeerDescribed(profile)):
                return (session.Admitted(profile),)
            case PeerMessage():
                return ()  # offers of a peer
            case session.Send() | session.Bulk() | session.Close() | session.Notice():
                return (output,)

    def _send_call_event(
        self, message: words.CallMessage, now: float
    ) -> Sequence[session.Output]:
        assert self._inner is not None, "the job came from the inner session"
        match message:
            case words.CallProgress() | words.CallsReturned():
                job = self._jobs.running.get(message.job_id)
                if job is None:
                    return ()  # cancelled meanwhile
                if self._jobs.keeps and isinstance(message, words.CallsReturned):
                    calls = self._jobs.calls
                    results, ends = calls.take_results(
                        message.job_id, message.results, now
                    )
                    if ends or not job.attached:
                        return self._send_ends(message.job_id, job.peer, ends, now)
                    message = words.CallsReturned(
                        message.job_id, message.lease, results
                    )
                if not job.attached:
                    return ()  # with the earlier connection
                renamed = replace(
                    message, job_id=job.request.job_id, lease=job.request.lease
                )
                return self._inner.send(ToPeer(job.peer, renamed), now)
            case _:
                return self._inner.send(ToPeer(ALL_PEERS, message), now)

    def _send_ends(
        self, stream: JobId, peer: str, ends: Sequence[words.Event], now: float
    ) -> Sequence[session.Output]:
        """Send the ends of calls that are jobs of their own, of a lost stream."""
        if stream in self._jobs.orphans and self._jobs.calls.is_done(stream):
            self._over.append(stream)
        return self._send_all(peer, ends, now)

    def _send_all(
        self, peer: str, events: Iterable[words.Event], now: float
    ) -> list[session.Output]:
        assert self._inner is not None, "the job came from the inner session"
        outputs: list[session.Output] = []
        for event in events:
            outputs += self._inner.send(ToPeer(peer, event), now)
        return outputs

    def _call_stream_command(
        self, peer: str, message: words.PushCalls | words.CancelCalls, now: float
    ) -> Sequence[words.Command | session.Output]:
        job_id = self._jobs.find(peer, message)
        if job_id is None:
            return ()
        calls = self._jobs.calls
        if isinstance(message, words.CancelCalls):
            if self._jobs.keeps:
                calls.recall(job_id, message.numbers)
            return (replace(message, job_id=job_id),)
        if not self._jobs.keeps:
            return (replace(message, job_id=job_id),)
        pushed = calls.push(job_id, message)
        outputs: list[words.Command | session.Output] = []
        if pushed.unwanted:
            outputs += self._recall(pushed.unwanted)
        if pushed.new:
            outputs.append(words.PushCalls(job_id, message.lease, pushed.new))
        if pushed.known:
            name = self._jobs.running[job_id].name
            returned = words.CallsReturned(*name, pushed.known)
            outputs += self._send_all(peer, [returned], now)
        return outputs

    def _on_joined(self, peer: str, joined: PeerJoined) -> Sequence[session.Admitted]:
        state = self._state
        if joined.respects_offers:
            self._respectful.add(peer)
        elif state.restriction and (peer == ALL_PEERS or not self._on_relay):
            state.declined = unenforceable(state.restriction)
            return ()
        state.admitted, state.peer_name = True, joined.name
        return (session.Admitted(),)

    def _rejection(self, peer: str) -> str:
        """Return why a new job of a peer is rejected; empty: it is not."""
        if self._state.restriction and peer not in self._respectful:
            return unenforceable(self._state.restriction)
        if len(self._jobs.running) >= JOBS_MAX:
            return f"the worker already has {JOBS_MAX} jobs"
        return ""

    def _start_job(
        self, peer: str, request: words.RunJob, now: float
    ) -> Sequence[words.Command | session.Output]:
        if reason := self._rejection(peer):
            rejected = words.Rejected(request.job_id, request.lease, reason)
            assert self._inner is not None, "the job came from the inner session"
            return self._inner.send(ToPeer(peer, rejected), now)
        stopped: list[words.Command] = []
        if self._given_until is not None:  # else no job is left of before
            # It is given anew, so its earlier lease has ended.
            stopped = [
                self._cancel(each)
                for each in self._jobs.unattached
                if self._jobs.running[each].request.job_id == request.job_id
            ]
            stopped += self._stop_call(self._jobs.calls.place_of(request.job_id))
        job_id = self._jobs.add(peer, request)
        if job_id is None:
            return (session.Notice(f"ignored duplicate job {request.job_id!a}"),)
        returnable = peer in self._respectful  # only Shoal's coordinators requeue it
        return (*stopped, replace(request, job_id=job_id, returnable=returnable))

    def _resume_job(
        self, peer: str, request: words.RunJob, now: float
    ) -> Sequence[words.Command | session.Output]:
        """Send what a coordinator lacks of a job that it gives again."""
        assert self._inner is not None, "the job came from the inner session"
        name = (request.job_id, request.lease)
        outputs: list[words.Command | session.Output] = []
        job = self._jobs.resume_ended(request)
        if job is None and (job_id := self._jobs.resume(peer, request)) is not None:
            outputs.append(replace(request, job_id=job_id))
            job = self._jobs.running[job_id]
        place = self._jobs.calls.find(request.job_id, request.resumes)
        if job is None and place is not None:
            return self._give_call(peer, place, request, now)
        if job is None:
            earlier = words.CancelJob(request.job_id, request.resumes)
            if (left := self._jobs.find(peer, earlier)) is not None:
                outputs.append(self._cancel(left))
            rejected = words.Rejected(*name, NOT_KEPT)
            return [*outputs, *self._inner.send(ToPeer(peer, rejected), now)]
        if job.sent:
            chunk = words.AnswerChunk(*name, [*job.sent])
            outputs += self._inner.send(ToPeer(peer, chunk), now)
        if job.end is not None:
            end = _with_peer_job_id(job.end, job)
            outputs += self._inner.send(ToPeer(peer, end), now)
        return outputs

    def _give_call(
        self, peer: str, place: CallPlace, request: words.RunJob, now: float
    ) -> Sequence[words.Command | session.Output]:
        """Go on with a call, whose stream its coordinator has lost."""
        end = self._jobs.calls.give(place, request.job_id, request.lease)
        if end is not None:
            return self._send_all(peer, [end], now)
        self._jobs.orphans.add(place.stream)
        return (replace(request, job_id=place.stream),)

    def _cancel_of_peer(
        self, peer: str, message: words.CancelJob
    ) -> Sequence[words.Command]:
        """Cancel a job; of a stream that its coordinator has lost, keep the calls."""
        jobs = self._jobs
        jobs.forget_ended(message.job_id, message.lease)
        job_id = jobs.find(peer, message)
        if job_id is None:
            place = jobs.calls.find(message.job_id, message.lease)
            if place is not None and jobs.calls.forget_result(place):
                return ()
            return self._stop_call(place)
        job = jobs.running[job_id]
        if job.attached or not isinstance(job.request.work, CallStream):
            return (self._cancel(job_id),)
        jobs.orphans.add(job_id)
        return self._stop_calls(job_id, jobs.calls.unnamed(job_id))

    def _stop_call(self, place: CallPlace | None) -> Sequence[words.Command]:
        """Stop a call of a stream that was not resumed."""
        if place is None or place.stream not in self._jobs.unattached:
            return ()
        return self._stop_calls(place.stream, [place.number])

    def _stop_calls(
        self, stream: JobId, numbers: Sequence[int]
    ) -> Sequence[words.Command]:
        """Stop calls of a stream, and the stream with the last one."""
        stopped = self._recall([CallPlace(stream, number) for number in numbers])
        if self._jobs.calls.is_done(stream):
            return [*stopped, self._cancel(stream)]
        return stopped

    def _recall(self, places: Sequence[CallPlace]) -> list[words.Command]:
        """Take calls back from their streams."""
        recalled: list[words.Command] = []
        for place in places:
            self._jobs.calls.recall(place.stream, [place.number])
            lease = self._jobs.running[place.stream].request.lease
            recalled.append(words.CancelCalls(place.stream, lease, (place.number,)))
        return recalled

    def _cancel(self, job_id: JobId) -> words.CancelJob:
        lease = self._jobs.running[job_id].request.lease
        self._jobs.remove(job_id)
        return words.CancelJob(job_id, lease)


def _with_peer_job_id(event: AboutJob, job: PeerJob) -> AboutJob:
    """Return an event with the peer's id of the job, and its present lease."""
    request = job.request
    if isinstance(event, words.AnswerChunk):
        # The hot path, once per token.
        return words.AnswerChunk(
            request.job_id, request.lease, event.pieces, event.copied
        )
    return replace(event, job_id=request.job_id, lease=request.lease)


@runtime_checkable
class FramedPeerSession(
    FramedSession[PeerMessage], session.HandlesConnectionLoss, Protocol
):
    """A session with peers on a byte stream that a link splits into messages."""


class FramedWorkerSession:
    """Lets a link split messages for the inner session of ``worker``.

    ``framed`` is that session; it exists before the first ``tick`` of ``worker``,
    because the link calls it first.
    """

    def __init__(self, worker: WorkerSession, framed: FramedPeerSession) -> None:
        self._worker = worker
        self._framed = framed
        self.accepts = worker.accepts
        self.head_size = framed.head_size
        self.body_size = framed.body_size
        self.buffer_for = framed.buffer_for
        self.checksum = framed.checksum
        self.connection_lost = framed.connection_lost

    @property
    def deadline(self) -> float | None:
        return self._worker.deadline

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        return self._worker.translate(self._framed.receive_messages(messages, now), now)

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        return self._worker.receive(batch, now)

    def send(self, message: words.Event, now: float) -> Sequence[session.Output]:
        return self._worker.send(message, now)

    def tick(
        self, now: float
    ) -> Sequence[words.Command | session.Admitted | session.Output]:
        return self._worker.tick(now)
