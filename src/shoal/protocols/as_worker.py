"""A worker's end of a wire on which all peers are alike.

A worker serves whoever may ask it and asks for nothing itself, so what peers offer is
not for it, and their jobs are all one to it, whichever peer they come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from shoal.domain.ids import JobId
from shoal.domain.sharing import ModelWord
from shoal.domain.vocabulary import (
    Advanced,
    CallsReturned,
    CallWord,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Failed,
    GiveBlob,
    Joined,
    Offered,
    Presented,
    Progress,
    PushCalls,
    RecallCalls,
    Rejected,
    Reported,
    RunJob,
)
from shoal.protocols.crowd import EVERYBODY, CrowdSession, From, Gone, Met, To
from shoal.protocols.session import Batch, Bulk, Close, Notice, Output, Send, Welcome

JOBS_MAX = 4096  # that peers may have at a worker at a time

_SAID = frozenset(
    {
        Offered,
        Conditioned,
        Draining,
        Reported,
        Progress,
        Completed,
        Rejected,
        Failed,
    }
)


@dataclass(slots=True)
class Held:
    """A job that a worker has: which peer's, and as the peer asked for it."""

    peer: str
    asked: RunJob


@dataclass(slots=True)
class Jobs:
    """A worker's jobs, across its connections to one coordinator.

    No two have the same name, whatever their peers call them.
    """

    held: dict[JobId, Held] = field(default_factory=dict)
    _named: dict[tuple[str, JobId, int], JobId] = field(default_factory=dict)
    _count: int = 0

    def take(self, peer: str, asked: RunJob) -> JobId | None:
        """Note a job; return our name for it, or None if the peer has it here."""
        theirs = (peer, asked.job_id, asked.lease)
        if theirs in self._named:
            return None
        self._count += 1
        job_id = JobId(f"{asked.job_id}#{self._count}")
        self._named[theirs] = job_id
        self.held[job_id] = Held(peer, asked)
        return job_id

    def named(
        self, peer: str, word: CancelJob | PushCalls | RecallCalls
    ) -> JobId | None:
        """Return our name for what a peer speaks of."""
        return self._named.get((peer, word.job_id, word.lease))

    def forget(self, job_id: JobId) -> None:
        """Forget a job that is over."""
        held = self.held.pop(job_id)
        del self._named[held.peer, held.asked.job_id, held.asked.lease]

    def of(self, peer: str) -> list[JobId]:
        """Return the jobs of a peer."""
        return [job_id for job_id, each in self.held.items() if each.peer == peer]


@dataclass(slots=True)
class Stay:
    """What a worker's connections to one coordinator have in common.

    ``welcome`` says whether somebody has let it in, and ``refusal`` why nobody will.
    """

    jobs: Jobs = field(default_factory=Jobs)
    welcome: bool = False
    refusal: str = ""


AboutJob: TypeAlias = Progress | Completed | Rejected | Failed


class AsWorker:
    """Puts a worker where a session with many peers wants one that hears them all.

    Args:
        begin: makes the session, given the time; ``accepts`` is what that will take.
        stay: outlives the connection.  What ran when it broke has been given to others
            by then, so that the next one begins by cancelling it.
    """

    def __init__(
        self,
        begin: Callable[[float], CrowdSession],
        accepts: frozenset[type],
        stay: Stay,
    ) -> None:
        self._begin = begin
        self._inner: CrowdSession | None = None
        self._stay = stay
        self._jobs = stay.jobs
        words = {each for each in accepts if issubclass(each, ModelWord | CallWord)}
        self.accepts: frozenset[type] = (_SAID & accepts) | words

    @property
    def deadline(self) -> float | None:
        return None if self._inner is None else self._inner.deadline

    def tick(self, now: float) -> Sequence[Command | Welcome | Output]:
        left: list[Command] = []
        if self._inner is None:
            self._inner = self._begin(now)
            left = [self._cancel(job_id) for job_id in [*self._jobs.held]]
        return [*left, *self.hear(self._inner.tick(now), now)]

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Welcome | Output]:
        assert self._inner is not None, "a session is ticked before it hears anything"
        return self.hear(self._inner.receive(batch, now), now)

    def issue(self, message: Event, now: float) -> Sequence[Output]:
        if self._inner is None:
            return ()
        match message:
            case Progress() | Completed() | Rejected() | Failed():
                held = self._jobs.held.get(message.job_id)
                if held is None:
                    return ()  # cancelled meanwhile
                if not isinstance(message, Progress):
                    self._jobs.forget(message.job_id)
                said = self._inner.issue(To(held.peer, _named(message, held)), now)
            case Offered() | Conditioned() | Draining() | Reported() | ModelWord():
                said = self._inner.issue(To(EVERYBODY, message), now)
            case CallWord():
                said = self._say_of_calls(message, now)
            case Joined() | Presented():
                raise AssertionError("nobody is told so on such a wire")
        return said

    def hear(
        self, outputs: Sequence[From | Output], now: float
    ) -> list[Command | Welcome | Output]:
        """Return what it means to the worker that peers say so."""
        heard = [*chain.from_iterable(self._heard(each, now) for each in outputs)]
        refusal = self._stay.refusal
        if refusal and not any(isinstance(each, Close) for each in heard):
            heard.append(Close(refusal))
        return heard

    def _heard(
        self, output: From | Output, now: float
    ) -> Sequence[Command | Welcome | Output]:
        match output:
            case From(peer, RunJob() as asked):
                return self._take(peer, asked, now)
            case From(peer, CancelJob() as word):
                job_id = self._jobs.named(peer, word)
                return () if job_id is None else (self._cancel(job_id),)
            case From(peer, Gone()):
                return [self._cancel(job_id) for job_id in self._jobs.of(peer)]
            case From(peer, PushCalls() | RecallCalls() as word):
                return self._about_lane(peer, word)
            case From(_, Dismiss() | GiveBlob() | ModelWord() as word):
                return (word,)
            case From(_, Met()):
                self._stay.welcome = True
                return (Welcome(),)
            case From():
                return ()  # what a peer offers
            case Send() | Bulk() | Close() | Notice():
                return (output,)

    def _say_of_calls(self, word: CallWord, now: float) -> Sequence[Output]:
        assert self._inner is not None, "it has said what this is about"
        match word:
            case Advanced() | CallsReturned():
                held = self._jobs.held.get(word.job_id)
                if held is None:
                    return ()  # cancelled meanwhile
                named = replace(word, job_id=held.asked.job_id, lease=held.asked.lease)
                return self._inner.issue(To(held.peer, named), now)
            case _:
                return self._inner.issue(To(EVERYBODY, word), now)

    def _about_lane(
        self, peer: str, word: PushCalls | RecallCalls
    ) -> Sequence[Command | Output]:
        job_id = self._jobs.named(peer, word)
        return () if job_id is None else (replace(word, job_id=job_id),)

    def _take(self, peer: str, asked: RunJob, now: float) -> Sequence[Command | Output]:
        if len(self._jobs.held) >= JOBS_MAX:
            why = f"{JOBS_MAX} jobs are there already"
            rejected = Rejected(asked.job_id, asked.lease, why)
            assert self._inner is not None, "it has just said so"
            return self._inner.issue(To(peer, rejected), now)
        job_id = self._jobs.take(peer, asked)
        if job_id is None:
            return (Notice(f"job {asked.job_id!a} came twice: one is ignored"),)
        return (replace(asked, job_id=job_id),)

    def _cancel(self, job_id: JobId) -> CancelJob:
        lease = self._jobs.held[job_id].asked.lease
        self._jobs.forget(job_id)
        return CancelJob(job_id, lease)


def _named(event: AboutJob, held: Held) -> AboutJob:
    """Return an event under the name that the job has with its peer."""
    job_id = held.asked.job_id
    if isinstance(event, Progress):
        return Progress(job_id, event.lease, event.pieces)  # one for each token
    return replace(event, job_id=job_id)
